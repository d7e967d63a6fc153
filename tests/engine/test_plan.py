"""Sizing against values worked by hand from public numbers."""

from __future__ import annotations

import json

import pytest

from airdecode.engine.cli import main
from airdecode.engine.plan import read_bytes
from airdecode.engine.sizing import Plan, plan, share_of

GIB = 2**30


@pytest.fixture(scope="module")
def deepseek() -> Plan:
    return plan("deepseek-r1", memory=64 * GIB, tp=16, max_len=131072)


def test_llama_2_7b_keeps_512_kib_a_token() -> None:
    answer = plan("llama-2-7b", memory=24 * GIB)
    assert answer.dtype == "float16" and answer.max_len == 4096
    assert answer.weight_bytes["published"] == 2 * 6_738_415_616
    (group,) = answer.cache
    assert group.token_bytes == 512 * 1024 and group.numbers == {"key": 4096, "value": 4096}
    at_16 = answer.fits[0]
    # A block of 16 tokens is 8 MiB; a sequence of 4,096 takes 256 of them.
    free = 24 * GIB - 2 * 6_738_415_616
    assert answer.free == free
    assert at_16.sequences == 5 and free // (5 * 256 * 8 * 2**20) == 1 and free // (6 * 256 * 8 * 2**20) == 0
    reserved = at_16.reserved_bytes // (8 * 2**20)
    assert reserved == 1 + 256 // 16  # the null block, and a slot for each padding token of the largest prefill
    assert at_16.blocks == (free // (8 * 2**20) - reserved,)
    assert at_16.table_bytes == 5 * 256 * 4
    assert at_16.waste_bytes == 15 * 512 * 1024 // 2


def test_deepseek_r1_keeps_1152_bytes_a_token_a_layer_on_every_device(deepseek: Plan) -> None:
    (group,) = deepseek.cache
    assert group.numbers == {"nope": 512, "rope": 64} and group.layers == 61
    assert group.token_bytes == group.device_token_bytes == 61 * 1152
    assert [fit.sequences for fit in deepseek.fits] == [2] * 5
    assert [fit.table_bytes for fit in deepseek.fits] == [2 * 131072 // size * 4 for size in (16, 32, 64, 128, 256)]
    assert [fit.waste_bytes for fit in deepseek.fits] == [
        (size - 1) * 61 * 1152 // 2 for size in (16, 32, 64, 128, 256)
    ]


def test_a_sixteenth_of_deepseek_r1_by_hand(deepseek: Plan) -> None:
    hidden, layers, dense = 7168, 61, 3
    heads, width, expert, vocabulary = 128 // 16, 18432 // 16, 2048 // 16, 129280 // 16
    attention = hidden * 1536 + hidden * 576  # both down-projections are whole
    attention += 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * hidden
    experts = 257 * 3 * hidden * expert  # the shared one among them
    router = (256 * hidden + 256) * 4  # float32
    norms = layers * (2 * hidden + 1536 + 512) + hidden
    matrices = layers * attention + dense * 3 * hidden * width + (layers - dense) * experts
    in_bf16 = 2 * (matrices + norms + 2 * vocabulary * hidden) + (layers - dense) * router
    assert deepseek.device_weight_bytes["auto"] == in_bf16

    def scales(out: int, depth: int) -> int:
        return 4 * -(-out // 128) * -(-depth // 128)

    of_attention = scales(1536, hidden) + scales(576, hidden) + scales(heads * 192, 1536)
    of_attention += scales(heads * 256, 512) + scales(hidden, heads * 128)
    of_dense = 2 * scales(width, hidden) + scales(hidden, width)
    of_experts = 257 * (2 * scales(expert, hidden) + scales(hidden, expert))
    in_fp8 = in_bf16 - matrices + layers * of_attention + dense * of_dense + (layers - dense) * of_experts
    assert deepseek.device_weight_bytes["published"] == in_fp8
    assert deepseek.free == 64 * GIB - in_fp8


@pytest.mark.parametrize(
    ("name", "layers", "experts", "total"),
    [
        ("gpt-oss-20b", 24, 32, 13_761_264_768),
        ("gpt-oss-120b", 36, 128, 65_248_815_744),
    ],
)
def test_mxfp4_weighs_what_the_published_index_says(name: str, layers: int, experts: int, total: int) -> None:
    wide = 2 * layers * experts * (2880 + 1)  # routers are float32 here and bfloat16 there
    assert plan(name, memory=GIB).weight_bytes["published"] == total + wide


def test_key_value_heads_are_divided_as_far_as_they_go() -> None:
    """8 key/value heads: 4 devices hold two each, 16 devices hold one each, two devices the same."""
    token = 36 * 2 * 8 * 128 * 2
    for tp, share in ((1, token), (4, token // 4), (8, token // 8), (16, token // 8), (32, token // 8)):
        (group,) = plan("qwen3-8b", memory=GIB, tp=tp).cache
        assert (group.token_bytes, group.device_token_bytes) == (token, share)
    assert share_of({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}, 3) == {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "hidden_size": 576,
        "head_dim": 64,
    }


def test_shares_add_up_to_the_whole_but_for_what_every_device_keeps() -> None:
    answer = plan("qwen3-8b", memory=GIB, tp=4)
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    assert 4 * answer.device_weight_bytes["auto"] == answer.weight_bytes["auto"] + 3 * norms


def test_int8_and_int4_hold_the_layers_and_the_head() -> None:
    embedding, norms = 151936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    matrices = 8_190_735_360 - embedding - norms
    outputs = 36 * ((32 + 2 * 8) * 128 + 4096 + 2 * 12288 + 4096) + 151936
    weights = plan("qwen3-8b", memory=GIB).weight_bytes
    assert weights["int8"] == 2 * (embedding + norms) + matrices + 4 * outputs
    assert weights["int4"] == 2 * (embedding + norms) + matrices // 2 + matrices // 16


def test_a_window_group_has_blocks_of_its_own() -> None:
    answer = plan("gpt-oss-20b", memory=24 * 10**9, max_len=8192)
    at_128 = answer.fits[3]
    full, window = at_128.blocks
    # 127 + 256 tokens of a window and a prefill chunk touch 4 blocks of 128; twice as many can be found again.
    assert at_128.sequences > 1 and window == at_128.sequences * 2 * 4
    token = 12 * 2 * 512 * 2  # one group's bytes a token
    used = (full + window) * 128 * token + at_128.reserved_bytes
    assert used <= answer.free < used + 128 * token


def test_what_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama-2-7b", "--memory", "13GiB", "--max-len", "4096"]) == 0
    out = capsys.readouterr().out
    assert "no sequence of 4,096 tokens fits" in out and "take more devices (--tp)" in out
    assert main(["plan", "--preset", "llama-2-7b", "--memory", "1GiB"]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_json_holds_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "llama-3.1-8b", "--memory", "24GiB", "--tp", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["memory"] == 24 * GIB and answer["tp"] == 2 and answer["max_len"] == 131072
    assert answer["cache"][0]["token_bytes"] == 2 * answer["cache"][0]["device_token_bytes"] == 32 * 2 * 8 * 128 * 2
    assert [fit["block_size"] for fit in answer["fits"]] == [16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "llama-9"], "unknown model 'llama-9'"),
        (["--memory", "64"], "'64' is no amount of memory; write 64GiB"),
        (["--tp", "3"], "tp is 3, which does not divide 32 query and 8 key/value heads; use one of 1, 2, 4, 8, 16, 32"),
        (["--max-len", "200000"], "max_len is 200000, llama-3.1-8b has 131072 positions"),
        (["--weights", "fp6"], "weights is 'fp6'; use one of published, auto, int8, int4"),
    ],
)
def test_bad_options_are_named(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(["plan", "--preset", "llama-3.1-8b", "--memory", "64GiB", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_memory_is_read_with_its_unit() -> None:
    assert [read_bytes(text) for text in ("64GiB", "1.5 GiB", "80GB")] == [64 * GIB, 3 * GIB // 2, 80 * 10**9]
