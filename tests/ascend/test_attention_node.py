"""The attention node against attention written out with loops: layouts, modes, paging, rope parts, sinks, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ascend import simulate
from torch import Tensor

from airdecode.graph.targets.ascend_sim.interpreter import DeviceValueError

H, G, D, P, N = 4, 2, 16, 8, 12
SCALE = 0.3
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    keywords = {"num_query_heads": H, "num_key_value_heads": G, "softmax_scale": SCALE} | keywords
    return simulate(
        lambda q, k, v, named: torch.ops.air.npu_fused_infer_attention_score_v2(q, k, v, **named)[0], q, k, v, keywords
    )


def by_hand(q: Tensor, k: Tensor, v: Tensor, sees: Any, sinks: Tensor | None = None, more: Any = None) -> Tensor:
    """q [S, H, D], k and v [L, G, D]; `sees(i, j)`: query i attends key j. `more`: query and key rope parts."""
    out = torch.zeros(*q.shape[:2], v.shape[-1])
    for i in range(len(q)):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            keys = [j for j in range(len(k)) if sees(i, j)]
            scores = [float(q[i, h] @ k[j, g]) + (float(more[0][i, h] @ more[1][j, g]) if more else 0.0) for j in keys]
            weights = [math.exp(SCALE * score) for score in scores]
            total = sum(weights) + (math.exp(float(sinks[h])) if sinks is not None else 0.0)
            for weight, j in zip(weights, keys, strict=True):
                out[i, h] += weight / total * v[j, g]
    return out


def causal(q: Tensor, k: Tensor, window: int = 10**6) -> Any:
    """The last query stands at the last key; of `window` keys its own is the last."""
    ahead = len(k) - len(q)
    return lambda i, j: i + ahead - window < j <= i + ahead


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.float(), wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def rows() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Three rows with 1, 3 and 2 queries over 5, 9 and 17 keys."""
    torch.manual_seed(0)
    sizes = [(1, 5), (3, 9), (2, 17)]
    q = [torch.randn(s, H, D) for s, _ in sizes]
    return q, [torch.randn(n, G, D) for _, n in sizes], [torch.randn(n, G, D) for _, n in sizes]


def paged(parts: list[Tensor], axes: int) -> tuple[Tensor, Tensor]:
    """Rows dealt into blocks in a scattered order; NaN wherever no token lies. Returns cache and table."""
    cache = torch.full((N, P, *parts[0].shape[1:]), math.nan)
    table = torch.full((len(parts), 3), N - 1, dtype=torch.int32)
    free = iter([7, 2, 9, 4, 1, 8, 3])
    for row, part in enumerate(parts):
        for start in range(0, len(part), P):
            block = next(free)
            table[row, start // P] = block
            cache[block, : len(part[start : start + P])] = part[start : start + P]
    return (cache.flatten(2) if axes == 3 else cache.transpose(1, 2).contiguous()), table


def lengths(values: list[int]) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("axes", [3, 4])
def test_packed_and_paged_causal(rows: Any, axes: int) -> None:
    q, k, v = rows
    keys, table = paged(k, axes)
    values, _ = paged(v, axes)
    got = attend(
        torch.cat(q), keys, values, input_layout="TND", sparse_mode=3, atten_mask=MASK, block_table=table, block_size=P,
        actual_seq_qlen=lengths([1, 4, 6]), actual_seq_kvlen=lengths([5, 9, 17]),
    )  # fmt: skip
    wanted = [by_hand(a, b, c, causal(a, b)) for a, b, c in zip(q, k, v, strict=True)]
    close(got, torch.cat(wanted))


@pytest.mark.parametrize("window", [1, 4, 100])
def test_c046_a_band_of_pre_tokens_sees_one_more_key(rows: Any, window: int) -> None:
    """pre_tokens = w - 1 is a window of w keys, the query's own included."""
    q, k, v = rows
    keys, table = paged(k, 3)
    values, _ = paged(v, 3)
    got = attend(
        torch.cat(q), keys, values, input_layout="TND", sparse_mode=4, atten_mask=MASK, block_table=table, block_size=P,
        actual_seq_qlen=lengths([1, 4, 6]), actual_seq_kvlen=lengths([5, 9, 17]), pre_tokens=window - 1, next_tokens=0,
    )  # fmt: skip
    wanted = [by_hand(a, b, c, causal(a, b, window)) for a, b, c in zip(q, k, v, strict=True)]
    close(got, torch.cat(wanted))


def test_packed_without_paging_takes_prefix_sums(rows: Any) -> None:
    q, k, v = rows
    got = attend(
        torch.cat(q), torch.cat(k), torch.cat(v), input_layout="TND", sparse_mode=3, atten_mask=MASK,
        actual_seq_qlen=lengths([1, 4, 6]), actual_seq_kvlen=lengths([5, 14, 31]),
    )  # fmt: skip
    wanted = [by_hand(a, b, c, causal(a, b)) for a, b, c in zip(q, k, v, strict=True)]
    close(got, torch.cat(wanted))


def test_c048_a_sink_takes_weight_and_gives_nothing(rows: Any) -> None:
    q, k, v = rows
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    got = attend(
        torch.cat(q), torch.cat(k), torch.cat(v), input_layout="TND", sparse_mode=3, atten_mask=MASK,
        actual_seq_qlen=lengths([1, 4, 6]), actual_seq_kvlen=lengths([5, 14, 31]), learnable_sink=sinks,
    )  # fmt: skip
    wanted = [by_hand(a, b, c, causal(a, b), sinks) for a, b, c in zip(q, k, v, strict=True)]
    close(got, torch.cat(wanted))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSND_NBSD"])
def test_rows_of_one_length(layout: str) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 3, H, D), torch.randn(2, 7, G, D), torch.randn(2, 7, G, D)
    wanted = torch.stack([by_hand(q[b], k[b], v[b], lambda i, j: j <= i + 4) for b in range(2)])
    given = layout.split("_")[0]
    put = {"BSH": lambda t: t.flatten(2), "BSND": lambda t: t, "BNSD": lambda t: t.transpose(1, 2)}[given]
    got = attend(*(put(t).contiguous() for t in (q, k, v)), input_layout=layout, sparse_mode=3, atten_mask=MASK)
    out = layout.split("_")[-1]
    take = {"BSH": lambda t: t.view(2, 3, H, D), "BSND": lambda t: t, "BNSD": lambda t: t.transpose(1, 2)}
    take["NBSD"] = lambda t: t.permute(1, 2, 0, 3)
    close(take[out](got), wanted)


def test_one_query_a_row_reads_its_length_only() -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 1, H * D), torch.randn(3, 6, G, D), torch.randn(3, 6, G, D)
    live = [1, 4, 6]
    for row, length in enumerate(live):
        k[row, length:], v[row, length:] = math.nan, math.nan
    got = attend(q, k.flatten(2), v.flatten(2), input_layout="BSH", actual_seq_kvlen=lengths(live))
    wanted = [by_hand(q[b].view(1, H, D), k[b], v[b], lambda i, j, n=live[b]: j < n) for b in range(3)]
    close(got.view(3, H, D), torch.cat(wanted))


def test_unpacked_single_queries_ignore_the_band() -> None:
    """As the pages say: with one query, sparse_mode and pre_tokens mean nothing outside of packed layouts."""
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 1, H * D), torch.randn(1, 6, G * D), torch.randn(1, 6, G * D)
    banded = attend(q, k, v, input_layout="BSH", sparse_mode=4, atten_mask=MASK, pre_tokens=1, next_tokens=0)
    close(banded, attend(q, k, v, input_layout="BSH"))


@pytest.mark.parametrize("nz", [False, True])
def test_absorbed_mla_with_rope_parts_over_a_latent_cache(nz: bool) -> None:
    torch.manual_seed(4)
    latent = [torch.randn(n, 1, 32) for n in (3, 9)]
    ropes = [torch.randn(n, 1, 16) for n in (3, 9)]
    q, q_rope = torch.randn(2, H, 32), torch.randn(2, H, 16)
    cache, table = paged(latent, 3)
    rope_cache, _ = paged(ropes, 3)
    if nz:  # [blocks, heads, size / 16, block, 16]
        cache, rope_cache = (
            c.view(N, P, -1, 16).transpose(1, 2).unsqueeze(1).contiguous() for c in (cache, rope_cache)
        )
    got = attend(
        q, cache, cache, input_layout="TND_NTD", query_rope=q_rope, key_rope=rope_cache, num_key_value_heads=1,
        block_table=table, block_size=P, actual_seq_qlen=lengths([1, 2]), actual_seq_kvlen=lengths([3, 9]),
    )  # fmt: skip
    wanted = [
        by_hand(q[b : b + 1], latent[b], latent[b], lambda i, j: True, more=(q_rope[b : b + 1], ropes[b]))
        for b in range(2)
    ]
    close(got.transpose(0, 1), torch.cat(wanted))


def test_version_1_means_the_same(rows: Any) -> None:
    q, k, v = rows
    packed = (torch.cat(q), torch.cat(k), torch.cat(v))
    named = {"input_layout": "TND", "sparse_mode": 3, "atten_mask": MASK, "num_key_value_heads": G}
    first = simulate(
        lambda q, k, v, named: torch.ops.air.npu_fused_infer_attention_score(q, k, v, **named)[0],
        *packed,
        named | {"num_heads": H, "scale": SCALE, "actual_seq_lengths": lengths([1, 4, 6])}
        | {"actual_seq_lengths_kv": lengths([5, 14, 31])},
    )  # fmt: skip
    second = attend(*packed, **named, actual_seq_qlen=lengths([1, 4, 6]), actual_seq_kvlen=lengths([5, 14, 31]))
    assert torch.equal(first, second)


REFUSED = {
    "names blocks": {"block_table": torch.tensor([[12], [0], [0]], dtype=torch.int32)},
    "its table of 1 blocks holds 8": {"actual_seq_kvlen": lengths([9, 1, 1])},
    "4 packed queries": {"actual_seq_qlen": lengths([1, 2, 3])},
    "it falls": {"actual_seq_qlen": lengths([2, 1, 4])},
    "3 rows": {"actual_seq_kvlen": lengths([1, 1])},
    "not one above the diagonal": {"sparse_mode": 3, "atten_mask": MASK.T.contiguous()},
    "undefined without row correction": {"sparse_mode": 3, "atten_mask": MASK},  # row 2 asks two queries of one key
    r"cache is \(12, 8, 32\) with block_size 4": {"block_size": 4},
}


@pytest.mark.parametrize("said", REFUSED)
def test_values_that_a_device_takes_silently_are_refused(said: str) -> None:
    cache = torch.zeros(N, P, G * D)
    sound: dict[str, Any] = {
        "block_table": torch.zeros(3, 1, dtype=torch.int32),
        "actual_seq_qlen": lengths([1, 2, 4]),
        "actual_seq_kvlen": lengths([1, 1, 1]),
        "block_size": P,
    }
    attend(torch.zeros(4, H, D), cache, cache, input_layout="TND", **sound)
    torch._dynamo.reset()
    with pytest.raises(DeviceValueError, match=said):
        attend(torch.zeros(4, H, D), cache, cache, input_layout="TND", **(sound | REFUSED[said]))


def test_c030_a_position_behind_the_rotary_table_is_an_error() -> None:
    table = torch.randn(4, 8)
    with pytest.raises(DeviceValueError, match=r"holds 4, outside of 0\.\.3"):
        simulate(lambda table, positions: table.index_select(0, positions), table, torch.tensor([1, 4]))
