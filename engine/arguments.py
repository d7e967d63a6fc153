"""What several commands take: types of command line arguments that refuse a mistake before any work is done."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """A file to be written. argparse.ArgumentTypeError where that cannot be, before minutes of work and not after."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: the folder {folder} does not exist; make it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"cannot write {text}: it is a folder, or not yours to write; name another file"
        )
    return path
