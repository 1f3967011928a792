"""Blocks come in the order in which steps need them, as far ahead as the cache allows, and follow the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from argosy.config.data import CacheConfig
from argosy.data.manifest import CHECKSUM_BLOCK_BYTES
from argosy.data.order import I64, Samples
from argosy.data.shards import TokenSource
from argosy.data.stores.ahead import PINNED_STEPS, ReadAhead
from argosy.data.stores.cache import Cache, FetchPlan
from argosy.data.stores.folder import StoreFolder
from argosy.data.stores.source import StoreSource
from data.stores.conftest import BLOCK_TOKENS
from waiting import wait_until

SEQ_LEN = 512
BLOCKS = 9
"""Of the prepared folder: six of its first shard, of which the last is short, and three of its second."""
ORDER = (3, 7, 0, 8, 5, 1, 6, 2, 4)


@pytest.fixture
def source(prepared: Path, tmp_path: Path) -> Callable[..., StoreSource]:
    """Open the folder in a store, with a cache of so many blocks."""

    def opened(blocks: int) -> StoreSource:
        size_gb = (blocks + 0.5) * CHECKSUM_BLOCK_BYTES / 1e9
        cache = Cache(CacheConfig(folder=str(tmp_path / "cache"), size_gb=size_gb))
        return StoreSource(StoreFolder(f"file://{prepared}", cache))

    return opened


def windows(prepared: Path) -> I64:
    """The number of a window inside each block: the sizes of the shards' files say where a block begins."""
    tokens = [path.stat().st_size // 2 for path in sorted(prepared.glob("train-*.bin"))]
    starts = [shard * tokens[0] + block * BLOCK_TOKENS for shard, blocks in ((0, 6), (1, 3)) for block in range(blocks)]
    return np.array(starts) // SEQ_LEN + 3


@contextmanager
def reading(
    source: StoreSource, prepared: Path, order: Sequence[int], step: int = 0, beside: Sequence[TokenSource] = ()
) -> Iterator[ReadAhead]:
    """Read ahead for a loader whose step s reads one window, of block order[s]; after the last the first comes."""
    places = windows(prepared)

    def samples(first: int, stop: int) -> tuple[Samples, I64]:
        steps = np.arange(first, stop)
        blocks = np.array(order)[steps % len(order)]
        return Samples(np.full(len(steps), len(beside)), np.zeros(len(steps), np.int64), places[blocks]), steps

    ahead = ReadAhead(source.store_folder.cache, [*beside, source], SEQ_LEN, samples, 1, step)
    try:
        yield ahead
    finally:
        ahead.close()


def here(source: StoreSource) -> set[int]:
    return set(np.flatnonzero(source.present()).tolist())


def plan_of(source: StoreSource) -> FetchPlan | None:
    """The plan that the cache's other readers see."""
    paths = list((source.store_folder.cache.folder / "readers").glob("*.rows"))
    return FetchPlan.read(paths[0]) if paths else None


def test_all_blocks_come_if_there_is_room_and_the_plan_has_the_step_that_needs_each(source, prepared):
    stored = source(100)
    with reading(stored, prepared, ORDER, beside=[TokenSource(prepared)]):
        wait_until(lambda: here(stored) == set(range(BLOCKS)))
        plan = plan_of(stored)
        assert plan is not None and plan.due(stored.keys_of(np.array(ORDER))).tolist() == list(range(BLOCKS))
        assert plan.pinned == 1 + PINNED_STEPS
    assert plan_of(stored) is None  # with the process's share of the cache
    assert np.array_equal(stored.tokens(0, 1000), TokenSource(prepared).tokens(0, 1000))
    assert (stored.store_folder.hits, stored.store_folder.misses) == (1, 0)


def test_half_of_a_small_cache_is_filled_ahead_of_the_loader(source, prepared):
    stored = source(4)
    with reading(stored, prepared, ORDER) as ahead:
        wait_until(lambda: here(stored) == set(ORDER[:2]))
        for step in (1, 2):
            ahead.at(step)
            wait_until(lambda step=step: ORDER[step + 1] in here(stored))
        plan = plan_of(stored)
        assert plan is not None and plan.due(stored.keys_of(np.array(ORDER[2:6]))).tolist() == [0, 1, 2, 3]
        assert len(here(stored)) <= 4


def test_it_follows_a_loader_that_jumps_ahead_and_back_and_a_new_order(source, prepared):
    stored, order = source(2), list(ORDER)  # one block ahead
    with reading(stored, prepared, order, step=4) as ahead:
        for step in (4, 7, 0):
            ahead.at(step)
            wait_until(lambda step=step: ORDER[step] in here(stored))
        order[:] = [6, *ORDER[1:]]
        ahead.forget()
        wait_until(lambda: 6 in here(stored))


def test_a_shard_that_is_missing_in_the_store_holds_up_no_other(source, prepared):
    stored = source(100)
    with reading(stored, prepared, ORDER) as ahead:
        (prepared / "train-00000.bin").rename(prepared / "elsewhere")
        ahead.at(1)
        wait_until(lambda: here(stored) >= {6, 7, 8})
