"""The fixed shapes that a configuration asks for, and which of them a step takes."""

from __future__ import annotations

from collections.abc import Sequence

from ..configs.engine import EngineConfig
from .plans import Bucket

# Prompts that one prefill step may join. Rows cost table width and attention set-up in every step of the bucket;
# beyond a few, a token budget is spent by few prompts anyway.
MAX_PROMPTS = 8


def decode_buckets(config: EngineConfig) -> tuple[Bucket, ...]:
    """In rising order of rows."""
    return tuple(Bucket(phase="decode", rows=rows, tokens=rows) for rows in config.row_buckets)


def prefill_buckets(config: EngineConfig) -> tuple[Bucket, ...]:
    """In rising order of tokens. One row for each prompt that a step may join, and one that owns the padding."""
    return tuple(
        Bucket(phase="prefill", rows=min(config.max_rows, MAX_PROMPTS, tokens) + 1, tokens=tokens)
        for tokens in config.token_buckets
    )


def smallest(buckets: Sequence[Bucket], tokens: int) -> Bucket:
    """The smallest bucket that holds `tokens`; the largest where none does."""
    for bucket in buckets:
        if bucket.tokens >= tokens:
            return bucket
    return buckets[-1]
