"""The tensor layouts of the attention node: how queries, keys and caches are read into [heads, tokens, size]."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .interpreter import Call

_QUERY = {"BNSD_BSND": ("BNSD", "BSND"), "BSH_NBSD": ("BSH", "NBSD"), "BSND_NBSD": ("BSND", "NBSD")}
_QUERY |= {"BNSD_NBSD": ("BNSD", "NBSD"), "TND_NTD": ("TND", "NTD"), "NTD_TND": ("NTD", "TND")}
_QUERY |= {"BSH_BNSD": ("BSH", "BNSD"), "BSND_BNSD": ("BSND", "BNSD")}
_PLAIN = ("BSH", "BSND", "BNSD", "TND", "NTD")


@dataclass(frozen=True)
class Layout:
    """One input layout and the layout of the result. B rows, S tokens a row, T packed tokens, N heads, H = N * D."""

    given: str
    wanted: str

    @property
    def packed(self) -> bool:
        """Rows of any length behind each other, instead of one length for all."""
        return "T" in self.given

    @property
    def batch_axis(self) -> int:
        """Where the rows are."""
        return self.given.index("B")

    def query_length(self, query: Tensor) -> int:
        """S of an unpacked query."""
        return query.shape[self.given.index("S")]

    def take(self, tensor: Tensor, heads: int) -> Tensor:
        """[N, T, D] of a tensor in this layout; rows behind each other."""
        if self.given == "BSH":
            tensor = tensor.view(*tensor.shape[:2], heads, -1)
        if self.given in ("BSH", "BSND"):
            return tensor.flatten(0, 1).transpose(0, 1)
        if self.given == "BNSD":
            return tensor.transpose(0, 1).flatten(1, 2)
        return tensor.transpose(0, 1) if self.given == "TND" else tensor

    def give(self, result: Tensor, starts: list[int]) -> Tensor:
        """[N, T, D] back into the layout of the result."""
        heads, _, size = result.shape
        rows = result.view(heads, len(starts) - 1, -1, size) if not self.packed else result
        if self.wanted == "BSH":
            return rows.permute(1, 2, 0, 3).flatten(2).contiguous()
        orders = {"BSND": (1, 2, 0, 3), "BNSD": (1, 0, 2, 3), "NBSD": (0, 1, 2, 3), "TND": (1, 0, 2), "NTD": (0, 1, 2)}
        return rows.permute(orders[self.wanted]).contiguous()


def layout_of(call: Call) -> Layout:
    """The layout that a node names."""
    name = call.attr("input_layout")
    if name not in _PLAIN and name not in _QUERY:
        raise call.refuse(f"input_layout {name!r} is not modelled")
    return Layout(*_QUERY.get(name, (name, name)))


def paged_rows(
    call: Call, name: str, cache: Tensor, table: Tensor, lengths: list[int], layout: Layout, groups: int
) -> list[Tensor]:
    """What each row owns of a paged cache, [G, L, D]. The rank of the cache says how its blocks lie.

    3: [blocks, block, G * D]; 4: [blocks, G, block, D], for BNSD and TND only; 5: [blocks, G, D/16, block, 16].
    """
    size = call.attr("block_size")
    if table.ndim != 2 or table.shape[0] != len(lengths):
        raise call.refuse(f"block_table is {tuple(table.shape)} for {len(lengths)} rows")
    if cache.ndim == 4 and layout.given not in ("BNSD", "TND"):
        raise call.refuse(f"layout {layout.given} reads caches [blocks, block, heads * size], {name} has four axes")
    axis = {3: 1, 4: 2, 5: 3}.get(cache.ndim)
    if axis is None or cache.shape[axis] != size:
        raise call.refuse(
            f"{name} cache is {tuple(cache.shape)} with block_size {size}: three axes are [blocks, block, heads * "
            "size], four [blocks, heads, block, size], five [blocks, heads, size/16, block, 16]"
        )
    rows = []
    for index, length in enumerate(lengths):
        count = -(-length // size)
        if length < 0 or count > table.shape[1]:
            raise call.refuse(
                f"row {index} has {length} keys, its table of {table.shape[1]} blocks holds {table.shape[1] * size}"
            )
        ids = table[index, :count].long()
        if count and not (int(ids.min()) >= 0 and int(ids.max()) < cache.shape[0]):
            raise call.refuse(f"row {index} names blocks {ids.tolist()}, the cache has 0..{cache.shape[0] - 1}")
        rows.append(_tokens(cache[ids], groups)[:, :length])
    return rows


def _tokens(blocks: Tensor, groups: int) -> Tensor:
    """[G, tokens, D] of the blocks of one row, in order."""
    if blocks.ndim == 3:
        return blocks.flatten(0, 1).view(-1 if blocks.numel() else 0, groups, blocks.shape[2] // groups).transpose(0, 1)
    if blocks.ndim == 4:
        return blocks.transpose(0, 1).flatten(1, 2)
    return blocks.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
