"""Blocks are found by their whole history, compared token by token."""

from __future__ import annotations

import numpy as np
from kv_world import FULL, World, config, window

from airdecode.host.prefix_cache import PrefixCache


class Colliding(bytes):
    """Tokens whose hashes are all equal."""

    def __hash__(self) -> int:
        return 7


def block(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def chain(cache: PrefixCache, key: tuple, *blocks: bytes) -> list:
    """Put `blocks` into the cache, in physical blocks 10, 11, ..; return the nodes, standing on the last."""
    node = cache.root(key)
    nodes = []
    for i, tokens in enumerate(blocks):
        node = cache.advance(node, tokens)
        cache.attach(node, 0, 10 + i + 10 * len(cache))
        nodes.append(node)
    return nodes


def test_equal_tokens_after_another_history_are_another_block() -> None:
    cache = PrefixCache(1)
    nodes = chain(cache, (), block(1), block(2))
    assert cache.walk((), [block(1), block(2), block(3)]) == nodes
    assert cache.walk((), [block(2)]) == []
    assert cache.walk((), [block(9), block(2)]) == []


def test_equal_hashes_are_not_equal_blocks() -> None:
    cache = PrefixCache(1)
    chain(cache, (), Colliding(b"aaaa"), Colliding(b"bbbb"))
    assert cache.walk((), [Colliding(b"cccc")]) == []
    assert cache.walk((), [Colliding(b"bbbb")]) == []
    assert len(cache.walk((), [Colliding(b"aaaa"), Colliding(b"bbbb")])) == 2


def test_c019_key_parts_carry_their_domain() -> None:
    cache = PrefixCache(1)
    chain(cache, (("salt", "x"),), block(1))
    assert cache.walk((("adapter", "x"),), [block(1)]) == []
    assert cache.walk((), [block(1)]) == []
    assert len(cache.walk((("salt", "x"),), [block(1)])) == 1


def test_c019_no_request_hits_another_namespace() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    world = World(config())
    for key, cached in (((("a", "x"),), 0), ((("b", "x"),), 0), ((("a", "x"),), 8), ((("a", ""), ("b", "x")), 0)):
        before = world.scheduler.stats()["cached_tokens"]
        world.add(tokens, 2, cache_key=key)
        world.run_all()
        assert world.scheduler.stats()["cached_tokens"] - before == cached, key


def test_what_is_known_of_a_block_dies_with_it_and_nodes_with_their_last_use() -> None:
    cache = PrefixCache(2)
    first, second = chain(cache, (), block(1), block(2))
    assert not cache.attach(first, 0, 99)  # the first block of a history stays
    cache.leave(second)
    cache.check([])
    held = second.blocks[0]
    cache.forget(0, first.blocks[0])
    assert cache.walk((), [block(1), block(2)]) == [first, second]  # a window group may need the second only
    assert first.blocks[0] == -1
    cache.forget(0, held)
    assert len(cache) == 0


def test_a_long_chain_is_forgotten_without_recursion() -> None:
    cache = PrefixCache(1)
    nodes = chain(cache, (), *(block(i) for i in range(50_000)))
    blocks = [node.blocks[0] for node in nodes]
    cache.leave(nodes[-1])
    for physical in blocks:
        cache.forget(0, physical)
    assert len(cache) == 0


def test_a_window_group_needs_the_live_window_only() -> None:
    """20 equal tokens: the full group has all five blocks, the window group of 6 only those that positions 11.. see."""
    groups = (FULL, window(6))
    world = World(config(prefill_buckets=(8,), prefill_tokens=8), groups, depth=1)
    prompt = [1 + i % 5 for i in range(21)]
    world.add(prompt, 1)
    world.run_all()
    memory = world.scheduler.memory
    for group, physical in ((1, 0), (1, 1)):  # what slid out first is taken for something else
        node = memory.prefixes.walk((), [block(*prompt[4 * i : 4 * i + 4]) for i in range(physical + 1)])[-1]
        lying = node.blocks[group]
        memory.pools[group]._kept.move_to_end(lying, last=False)
        taken = memory.pools[group].acquire(len(memory.pools[group]._free) + 1)
        memory.pools[group].release(taken, until=-1)
        assert node.blocks[group] == -1
    before = world.scheduler.stats()["cached_tokens"]
    world.add([*prompt[:20], 9, 9], 1)
    world.run_all()  # every read is held against the truth
    assert world.scheduler.stats()["cached_tokens"] - before == 20
    assert world.drained()
