"""Finds full blocks of equal history again.

A block is known by its chain: the node of the block before it and its own tokens, and at the root the key that the
whole sequence was computed under. Nodes are found by the hash of (parent node, tokens) and compared by the tokens
themselves, link by link from the root, so equal hashes can never hand out another history's block. A node says in which
block of each cache group its content lies; what it says of a block dies when that block is taken for something else.

A node lives as long as a block lies under it, a longer chain runs through it, or a sequence stands on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NO_BLOCK = -1

# Whatever besides tokens keys and values depend on, as (domain, value) pairs: ("adapter", "x") is not ("salt", "x").
CacheKey = tuple[tuple[str, str], ...]


class Node:
    """One full block's tokens at the end of one history. Equal only to itself."""

    __slots__ = ("blocks", "parent", "tokens", "uses")

    def __init__(self, parent: Node | None, tokens: bytes | CacheKey, num_groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = [NO_BLOCK] * num_groups  # for each cache group the block that holds this content
        self.uses = 0  # blocks + children + sequences standing here


class PrefixCache:
    """All nodes, and the node of each block."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._nodes: dict[tuple[Node | None, bytes | CacheKey], Node] = {}
        self._node_of: tuple[dict[int, Node], ...] = tuple({} for _ in range(num_groups))

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, key: CacheKey) -> Node:
        """Where histories under `key` begin; the caller stands on it until `leave`."""
        return self._step(None, key)

    def walk(self, key: CacheKey, blocks: Iterable[bytes]) -> list[Node]:
        """The known nodes along `blocks`, the tokens of a history's full blocks in order, as far as they go."""
        node = self._nodes.get((None, key))
        chain: list[Node] = []
        if node is None:
            return chain
        for tokens in blocks:
            node = self._nodes.get((node, tokens))
            if node is None:
                break
            chain.append(node)
        return chain

    def advance(self, node: Node, tokens: bytes) -> Node:
        """Step from `node`, on which the caller stands, to the node of the next full block."""
        child = self._step(node, tokens)
        self.leave(node)
        return child

    def stand(self, node: Node) -> Node:
        """One user more of a node."""
        node.uses += 1
        return node

    def leave(self, node: Node) -> None:
        """One user less; what nobody uses is forgotten, up the chain."""
        while True:
            node.uses -= 1
            if node.uses:
                return
            del self._nodes[node.parent, node.tokens]
            if node.parent is None:
                return
            node = node.parent

    def attach(self, node: Node, group: int, block: int) -> bool:
        """Say that `block` holds this node's content. False where another block was first, which stays."""
        if node.blocks[group] != NO_BLOCK:
            return False
        node.blocks[group] = block
        self._node_of[group][block] = self.stand(node)
        return True

    def forget(self, group: int, block: int) -> None:
        """The block is taken for something else."""
        node = self._node_of[group].pop(block)
        node.blocks[group] = NO_BLOCK
        self.leave(node)

    def _step(self, parent: Node | None, tokens: bytes | CacheKey) -> Node:
        node = self._nodes.get((parent, tokens))
        if node is None:
            node = self._nodes[parent, tokens] = Node(parent, tokens, self._num_groups)
            if parent is not None:
                parent.uses += 1
        return self.stand(node)

    def check(self, standing: Iterable[Node]) -> None:
        """Assert that blocks and nodes agree, and that each node counts its uses; `standing`: where sequences stand."""
        uses = Counter(standing)
        uses.update(node.parent for node in self._nodes.values() if node.parent is not None)
        for group, nodes in enumerate(self._node_of):
            for block, node in nodes.items():
                assert node.blocks[group] == block, f"block {block} and its node disagree"
            uses.update(nodes.values())
        for node in self._nodes.values():
            assert node.uses == uses[node] > 0, f"a node counts {node.uses} uses and has {uses[node]}"
