"""What engine tests ask."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from airdecode import Engine

Make = Callable[..., Engine]


@functools.cache
def tokenized(name: str) -> Path:
    """A tiny checkpoint with a tokenizer of single letters."""
    made = Path(tempfile.mkdtemp(prefix="tokenized-")) / name
    shutil.copytree(tiny.folder(name), made)
    letters = ["\u0120", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE({letter: 3 + i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in lengths]
