"""One sample's tokens as they come: text pieces out, and when to stop.

Pieces joined are the final text, whatever the tokens' borders; no piece ends inside a character, and text that may be
the beginning of a stop string is held back until it cannot be. The cost of a token does not grow with the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from ..configs.sampling import SamplingParams
from .outputs import FinishReason
from .text import Text


class Stream:
    """Follows one sample. `finish_reason` is None until it has ended; `matched` is the token or text that ended it."""

    finish_reason: FinishReason | None = None
    matched: int | str | None = None

    def __init__(self, text: Text, params: SamplingParams, max_tokens: int) -> None:
        """`max_tokens`: that of the parameters, or less where the model's length ends sooner."""
        self.num_tokens = 0  # those that belong to the sample, the end token included
        self._text = text
        self._max_tokens = max_tokens
        self._min_tokens = params.min_tokens
        self._ends = frozenset() if params.ignore_eos else text.end_token_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stops = _StopStrings(params.stop) if params.stop else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All pieces joined."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Iterable[int]) -> str:
        """The next piece of text, maybe empty. Tokens after the one that ends the sample are left out."""
        piece = ""
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            piece += self._push(token_id)
        if piece:
            self._pieces.append(piece)
        return piece

    def finish(self, reason: FinishReason) -> str:
        """End the sample from outside; returns what was held back."""
        if self.finish_reason is not None:
            return ""
        piece = self._end(reason)
        if piece:
            self._pieces.append(piece)
        return piece

    def _push(self, token_id: int) -> str:
        """One token, and the end conditions in their order: end token, stop string, stop token id, length."""
        may_end = self.num_tokens >= self._min_tokens
        self.num_tokens += 1
        if may_end and token_id in self._ends:
            return self._end("stop", token_id)
        piece = self._decode(token_id)
        if self._stops is not None:
            piece, found = self._stops.feed(piece, active=self.num_tokens >= self._min_tokens)
            if found is not None:
                self.finish_reason, self.matched = "stop", found
                return piece
        if may_end and token_id in self._stop_ids:
            return piece + self._end("stop", token_id)
        if self.num_tokens >= self._max_tokens:
            return piece + self._end("length")
        return piece

    def _decode(self, token_id: int) -> str:
        data = self._text.bytes_of(token_id)
        if self._at_start and data:
            data = self._text.after_lead(data)
            self._at_start = False
        return self._decoder.decode(data)

    def _end(self, reason: FinishReason, matched: int | None = None) -> str:
        """Nothing more will come: what was held back is text after all, and half a character is U+FFFD."""
        self.finish_reason, self.matched = reason, matched
        held = self._stops.held if self._stops is not None else ""
        return held + self._decoder.decode(b"", final=True)


class _StopStrings:
    """Looks for stop strings in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.held = ""  # the longest end of the text so far that a stop string begins with

    def feed(self, piece: str, *, active: bool) -> tuple[str, str | None]:
        """What can be given out, and the stop string that was found. If several end in the piece, the first to end.

        A stop string that ends in a piece while not `active` is text like any other.
        """
        text = self.held + piece
        if active and piece:
            matches = []
            for stop in self._stops:
                start = text.find(stop, max(0, len(self.held) - len(stop) + 1))
                if start >= 0:
                    matches.append((start + len(stop), start, stop))
            if matches:
                _, start, stop = min(matches)
                return text[:start], stop
        hold = max(self._overlap(text, stop) for stop in self._stops)
        self.held = text[len(text) - hold :]
        return text[: len(text) - hold], None

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Characters at the end of `text` that `stop` begins with, without being all of it."""
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
