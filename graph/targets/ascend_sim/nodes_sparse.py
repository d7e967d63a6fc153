"""Sparse latent attention: an indexer that picks positions for each token, and attention over those alone.

Sources: the vendor's pages of npu_lightning_indexer and npu_sparse_flash_attention; paged caches, blocks of one token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .interpreter import Call, node

_FOREVER = 2**63 - 1


@node("LightningIndexer")
def lightning_indexer(call: Call) -> tuple[Tensor, Tensor | None]:
    """A key scores the sum over heads of weight * relu(q . k); the best come first, the earlier of equals."""
    call.expect(layout_key="PA_BSND", pre_tokens=_FOREVER, next_tokens=_FOREVER, return_values=False)
    query, weights, count = call["query"], call["weights"].float(), call.attr("sparse_count")
    flat = query.reshape(-1, *query.shape[-2:])
    weights = weights.reshape(len(flat), -1)
    chosen = torch.full((len(flat), count), -1, dtype=torch.int32)
    for span, last, blocks in _rows(call, "actual_seq_lengths_key", call["key"].shape[:2]):
        (key,) = _stored(call, blocks, last, "key")
        products = torch.einsum("qhd,kd->qhk", flat[span].float(), key).relu()
        scores = (weights[span].unsqueeze(-1) * products).sum(1)
        scores = scores.masked_fill(_future(call, len(scores), last), float("-inf"))
        values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
        found = torch.where(torch.isneginf(values), -1, places)[:, :count]
        chosen[span, : found.shape[1]] = found.int()
    return chosen.view(*query.shape[:-2], 1, count), None


@node("SparseFlashAttention")
def sparse_flash_attention(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Absorbed: keys are [latent, rope], values the latent; a token sees what its indices name, as far as it may."""
    call.only("sinks")
    call.expect(layout_kv="PA_BSND", attention_mode=2, sparse_block_size=1, return_softmax_lse=False)
    call.expect(pre_tokens=_FOREVER, next_tokens=_FOREVER)
    query = torch.cat((call["query"].float(), call["query_rope"].float()), -1)
    flat = query.reshape(-1, *query.shape[-2:])
    indices = call["sparse_indices"]
    own = indices.reshape(len(flat), -1)
    out = flat.new_zeros(*flat.shape[:2], call["query"].shape[-1])
    for span, last, blocks in _rows(call, "actual_seq_lengths_kv", call["key"].shape[:2]):
        latent, rope = _stored(call, blocks, last, "key", "key_rope")
        (value,) = _stored(call, blocks, last, "value")
        hidden = _future(call, len(flat[span]), last) | ~_named(call, own[span], last)
        if bool(hidden.all(-1).any()):
            raise call.refuse("a token sees no key at all: its indices name none that it may see")
        scores = torch.einsum("qhd,kd->qhk", flat[span], torch.cat((latent, rope), -1)) * call.attr("scale_value")
        weights = torch.softmax(scores.masked_fill(hidden.unsqueeze(1), float("-inf")), -1)
        out[span] = torch.einsum("qhk,kd->qhd", weights, value)
    return out.view(call["query"].shape).to(call["query"].dtype), None, None


def _rows(call: Call, lengths_name: str, cache: torch.Size) -> Iterator[tuple[slice, int, Tensor]]:
    """For each row: its queries, its number of keys, and the blocks that hold them."""
    table, lengths = call["block_table"], call.numbers(lengths_name)
    query, (blocks, block) = call["query"], cache
    if table.dtype != torch.int32 or any(
        call[name].dtype != torch.int32 for name in ("actual_seq_lengths_query", lengths_name)
    ):
        raise call.refuse("the block table and both lengths are int32")
    if call.attr("layout_query") == "TND":
        ends = call.numbers("actual_seq_lengths_query")
        if ends != sorted(ends) or ends[-1] != len(query):
            raise call.refuse(f"actual_seq_lengths_query {ends} does not rise to the {len(query)} packed queries")
    else:
        ends = [query.shape[1] * (row + 1) for row in range(len(query))]
    if len(table) != len(ends) or len(lengths) != len(ends):
        raise call.refuse(f"{len(ends)} rows of queries, {len(lengths)} key lengths, {len(table)} rows of blocks")
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        used = table[row, : -(-lengths[row] // block)].long()
        if len(used) * block < lengths[row]:
            raise call.refuse(f"row {row} has {lengths[row]} keys, its table of {len(used)} blocks holds fewer")
        if len(used) and not (int(used.min()) >= 0 and int(used.max()) < blocks):
            raise call.refuse(f"row {row} names blocks {used.tolist()}, the cache has 0..{blocks - 1}")
        if end > start:
            yield slice(start, end), lengths[row], used


def _stored(call: Call, blocks: Tensor, length: int, *names: str) -> list[Tensor]:
    """[L, size] float32 of each cache, of which only the row's own blocks are read."""
    return [call[name][blocks].flatten(0, 2)[:length].float() for name in names]


def _future(call: Call, queries: int, keys: int) -> Tensor:
    """[Q, L] True for keys behind the query's own; the last query stands at the last key."""
    mode = call.attr("sparse_mode")
    if mode not in (0, 3):
        raise call.refuse(f"sparse_mode {mode} is not modelled, only 0 and 3")
    place = torch.arange(queries).unsqueeze(1) + (keys - queries if mode == 3 else keys)
    return torch.arange(keys) > place


def _named(call: Call, indices: Tensor, keys: int) -> Tensor:
    """[Q, L] True where a token's indices name the key. Behind the first -1 there is none."""
    if bool(((indices[:, :-1] < 0) & (indices[:, 1:] >= 0)).any()) or int(indices.max()) >= keys:
        raise call.refuse(f"indices name keys behind a -1, or beyond the row's {keys}")
    place = torch.where(indices < 0, keys, indices).long()
    return torch.zeros(len(indices), keys + 1, dtype=torch.bool).scatter(1, place, True)[:, :keys]
