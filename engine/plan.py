"""`airdecode plan`: the command and its table; the arithmetic is sizing's."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..configs import published

if TYPE_CHECKING:  # torch comes with it, and the command line should start without
    from .sizing import GroupCache, Plan

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `airdecode plan`."""
    parser.add_argument(
        "--preset", required=True, metavar="NAME|FILE", help=f"a config.json, or one of {', '.join(published.names())}"
    )
    parser.add_argument("--memory", required=True, help="of one device for weights and caches, for example 64GiB")
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model (default: %(default)s)")
    parser.add_argument("--max-len", type=int, help="tokens of a sequence (default: all that the model allows)")
    parser.add_argument(
        "--weights",
        default="published",
        help="or auto (floats, as the engine has them), int8, int4 (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main_plan(arguments: argparse.Namespace) -> None:
    """Print the plan that the options ask for."""
    from .sizing import plan

    memory = read_bytes(arguments.memory)
    answer = plan(
        arguments.preset, memory=memory, tp=arguments.tp, max_len=arguments.max_len, weights=arguments.weights
    )
    print(json.dumps(asdict(answer), indent=2) if arguments.json else as_text(answer))


def read_bytes(text: str) -> int:
    """64GiB, 80GB, 512MiB as bytes. Raises ValueError naming the units."""
    number = text.rstrip("KMGTiB")
    try:
        return int(float(number) * _UNITS[text[len(number) :].strip()])
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is no amount of memory; write 64GiB or 80GB ({', '.join(_UNITS)})") from None


def bytes_text(count: int) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("GiB", "MiB", "KiB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:,.1f} {unit}"
    return f"{count} B"


def as_text(answer: Plan) -> str:
    """For a terminal."""
    lines = [
        f"{answer.model}: {answer.parameters:,} parameters ({answer.source})",
        f"{answer.tp} device{'s' * (answer.tp > 1)} of {bytes_text(answer.memory)}, caches in {answer.dtype}, "
        f"sequences of {answer.max_len:,} tokens",
        "",
        f"{'weights':24}{'in all':>12}{'a device':>12}",
    ]
    as_published = answer.dtype if answer.quantization == "none" else answer.quantization
    stored = {"published": f"published ({as_published})", "auto": f"auto ({answer.dtype})"}
    for kind, size in answer.weight_bytes.items():
        one = answer.device_weight_bytes[kind]
        note = "  does not fit" if one >= answer.memory else ""
        mark = "*" if kind == answer.weights else " "
        lines.append(f"{mark} {stored.get(kind, kind):22}{bytes_text(size):>12}{bytes_text(one):>12}{note}")
    parts = ", ".join(f"{part} {bytes_text(size)}" for part, size in answer.device_part_bytes.items())
    lines += [f"  * a device's share: {parts}", "", "cache a token"]
    lines += [f"  {_group_text(group, answer.tp)}" for group in answer.cache]
    lines += ["", f"beside the weights: {bytes_text(max(answer.free, 0))} a device"]
    if not any(fit.sequences for fit in answer.fits):
        longest = max(fit.longest for fit in answer.fits)
        lines.append(
            f"no sequence of {answer.max_len:,} tokens fits, {longest:,} at most: take more devices (--tp), more "
            "--memory, smaller --weights or a smaller --max-len"
        )
    lines.append(
        f"{'block':>7}{'blocks':>20}{'sequences':>11}{'table a step':>14}{'reserved':>11}{'waste a sequence':>18}"
    )
    for row in answer.fits:
        blocks = " + ".join(f"{count:,}" for count in row.blocks)
        lines.append(
            f"{row.block_size:>7}{blocks:>20}{row.sequences:>11,}{bytes_text(row.table_bytes):>14}"
            f"{bytes_text(row.reserved_bytes):>11}{bytes_text(row.waste_bytes):>18}"
        )
    return "\n".join(lines)


def _group_text(group: GroupCache, tp: int) -> str:
    numbers = " + ".join(f"{name} {count:,}" for name, count in group.numbers.items())
    window = "" if group.window is None else f" of {group.window} tokens"
    text = f"{group.kind}{window}, {group.layers} layers: {numbers}, {group.token_bytes // group.layers:,} B a layer, "
    text += f"{group.token_bytes:,} B in all"
    if tp == 1:
        return text
    held = group.device_token_bytes * tp // group.token_bytes
    return f"{text}; a device keeps {group.device_token_bytes:,} B" + (f", {held} devices the same" if held > 1 else "")
