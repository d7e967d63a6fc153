"""Pieces joined are the text, stop strings never leak, and the end conditions come in their order."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from airdecode import SamplingParams
from airdecode.engine.stream import Stream
from airdecode.engine.text import Text

BYTE_CHARS = bytes_to_unicode()


def script(tokens: list[bytes], ends: tuple[bytes, ...] = ()) -> tuple[Text, list[int]]:
    """A byte-level tokenizer that has just these tokens, and the tokens' ids. `ends` are special end tokens."""
    spelled = ["".join(BYTE_CHARS[byte] for byte in token) for token in tokens]
    vocab = {token: place for place, token in enumerate(dict.fromkeys(spelled))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    tokenizer.decoder = decoders.ByteLevel()
    named = [end.decode() for end in ends]
    tokenizer.add_special_tokens(named)
    text = Text(tokenizer, vocab_size=10_000, end_token_ids=[vocab[end] for end in named])
    return text, [vocab[token] for token in spelled]


def run(text: Text, ids: list[int], limit: int = 1000, **params: Any) -> tuple[list[str], Stream]:
    stream = Stream(text, SamplingParams(**params), limit)
    pieces = []
    for token in ids:
        pieces.append(stream.push([token]))
        if stream.finish_reason is not None:
            break
    if stream.finish_reason is None:
        pieces.append(stream.finish("length"))
    assert "".join(pieces) == stream.text
    return pieces, stream


def test_c080_characters_split_over_tokens_come_whole() -> None:
    """An emoji of four bytes, a syllable of three, a letter of two, split at every set of places."""
    whole = "a😀안é"
    data = whole.encode()
    for cuts in itertools.product((False, True), repeat=len(data) - 1):
        places = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), len(data)]
        tokens = [data[start:end] for start, end in itertools.pairwise(places)]
        text, ids = script(tokens)
        pieces, stream = run(text, ids)
        assert stream.text == whole == text.decode(ids)
        assert "\ufffd" not in "".join(pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=25), st.data())
def test_pieces_joined_are_the_whole_decode(tokens: list[bytes], data: st.DataObject) -> None:
    """Whatever the bytes, and however many tokens come at once."""
    text, ids = script(tokens)
    stream = Stream(text, SamplingParams(), 1000)
    joined, rest = "", ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        joined += stream.push(rest[:count])
        rest = rest[count:]
    joined += stream.finish("abort")
    assert joined == stream.text == text.decode(ids) == b"".join(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("tokens", "stop", "emitted", "text"),
    [
        (["DEF", "G", "HI", "J", "K"], "DEFGHIJ", ["", "", "", ""], ""),
        (["the", " br", "own", " fox", " x"], "own fox", ["the", " br", "", ""], "the br"),
        (["ab", "ab", "abc", "z"], "ababc", ["", "", "ab"], "ab"),
        (["aab", "z"], "ab", ["a"], "a"),
        (["abX", "Y", "Z!"], "XYQ", ["ab", "", "XYZ!", ""], "abXYZ!"),
        (["ab", "X"], "XY", ["ab", "", "X"], "abX"),
        (["안", "녕", "!"], "녕!", ["안", "", ""], "안"),
    ],
)
def test_c077_a_stop_string_over_several_tokens_does_not_leak(
    tokens: list[str], stop: str, emitted: list[str], text: str
) -> None:
    tokenizer, ids = script([token.encode() for token in tokens])
    pieces, stream = run(tokenizer, ids, stop=stop)
    assert pieces == emitted
    assert stream.text == text
    assert (stream.finish_reason, stream.matched) == (("stop", stop) if len(pieces) <= len(ids) else ("length", None))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_c077_the_stream_is_the_text_up_to_the_first_stop_string(tokens: list[str], stops: list[str]) -> None:
    """Whatever the borders: the stop string that ends first is what a look at the whole text finds."""
    tokenizer, ids = script([token.encode() for token in tokens])
    pieces, stream = run(tokenizer, ids, stop=stops)
    whole, longest = "".join(tokens), max(map(len, stops))
    ends = sorted((end, start, whole[start:end]) for start in range(len(whole)) for end in range(start, len(whole) + 1))
    found = next(((start, stop) for _, start, stop in ends if stop in stops), None)
    assert stream.text == (whole if found is None else whole[: found[0]])
    assert stream.matched == (None if found is None else found[1])
    given_out = ""
    for piece, token_end in zip(pieces, itertools.accumulate(map(len, tokens)), strict=False):
        given_out += piece
        if stream.finish_reason == "length":
            assert token_end - len(given_out) < longest, "more was held back than could match"


def test_the_order_of_the_end_conditions() -> None:
    """End token, then stop string, then stop token id, then length, when one token meets them all."""
    text, ids = script([b"a", b"END"], ends=(b"END",))
    everything: dict[str, Any] = {"stop": "END", "stop_token_ids": (ids[1],)}
    _, stream = run(text, ids, limit=2, **everything)
    assert (stream.text, stream.finish_reason, stream.matched) == ("a", "stop", ids[1])
    plain, ids = script([b"a", b"END"])
    _, stream = run(plain, ids, limit=2, **everything)
    assert (stream.text, stream.finish_reason, stream.matched) == ("a", "stop", "END")
    _, stream = run(plain, ids, limit=2, stop_token_ids=(ids[1],))
    assert (stream.text, stream.finish_reason, stream.matched) == ("aEND", "stop", ids[1])
    _, stream = run(plain, ids, limit=2)
    assert (stream.text, stream.finish_reason, stream.matched) == ("aEND", "length", None)


def test_c082_any_end_token_ends_and_none_is_shown() -> None:
    text, ids = script([b"a", b"<5>", b"<3>"], ends=(b"<5>", b"<3>"))
    for end in ids[1:]:
        _, stream = run(text, [ids[0], end, ids[0]])
        assert (stream.text, stream.finish_reason, stream.matched, stream.num_tokens) == ("a", "stop", end, 2)
    _, stream = run(text, [ids[0], ids[1], ids[0]], limit=3, ignore_eos=True)
    assert (stream.text, stream.finish_reason) == ("aa", "length"), "an end token is never text"


def test_c084_nothing_but_length_ends_before_min_tokens() -> None:
    text, ids = script([b"a", b"b", b"<5>"], ends=(b"<5>",))
    a, b, end = ids
    _, stream = run(text, [end, b, end, a, end], min_tokens=4, stop_token_ids=(b,))
    assert (stream.text, stream.num_tokens, stream.matched) == ("ba", 5, end)
    _, stream = run(text, [a, b, a, b, a], min_tokens=4, stop="ab")
    assert (stream.text, stream.num_tokens, stream.matched) == ("ab", 4, "ab")
    _, stream = run(text, [a, b, a, a, b], min_tokens=2, stop=["ab", "aba!"])
    assert stream.text == "", "a stop string that ends with token 2 counts"
    _, stream = run(text, [a, b, a, a, b], min_tokens=3, stop=["ab", "aba!"])
    assert (stream.text, stream.num_tokens) == ("aba", 5), "one that ended before does not, though it is held back"


def test_half_a_character_at_the_end_is_a_replacement_mark() -> None:
    text, ids = script([b"a", "😀".encode()[:2]])
    pieces, stream = run(text, ids, limit=2)
    assert pieces == ["a", "\ufffd"]
    assert stream.text == text.decode(ids)


def test_tokens_after_the_end_are_left_out() -> None:
    text, ids = script([b"a", b"b", b"<e>"], ends=(b"<e>",))
    stream = Stream(text, SamplingParams(), 10)
    assert stream.push([ids[0], ids[2], ids[1]]) == "a"
    assert stream.num_tokens == 2
    assert stream.push([ids[1]]) == stream.finish("abort") == ""
    assert stream.finish_reason == "stop"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Ten times the tokens take about ten times as long: a wide margin, against a square."""
    text, ids = script([b"ab", b"c "])

    def seconds(count: int) -> float:
        stream = Stream(text, SamplingParams(stop=["cab!"], max_tokens=count), count)
        start = time.process_time()
        for place in range(count):
            stream.push([ids[place % 2]])
        assert len(stream.text) == 2 * count
        return time.process_time() - start

    seconds(100)
    assert seconds(40_000) < 40 * max(min(seconds(4_000) for _ in range(3)), 1e-3)
