"""Fetches the blocks of the steps to come, in the order in which they are needed.

The order of samples is known for ever, so what to fetch and what to evict need no guess: half of this process's share
of the cache is for blocks that it needs next, wherever they come from; the rest stays with blocks that it has, as long
as no others are needed sooner (`Cache`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from argosy.data.manifest import Shard
from argosy.data.order import I64, Samples
from argosy.data.shards import TokenSource
from argosy.data.stores.cache import Cache, Reader
from argosy.data.stores.folder import STORE_PAUSES_S, StoreFolder
from argosy.data.stores.source import FETCHES, StoreSource
from argosy.data.stores.store import StoreUnreachable
from argosy.errors import ArgosyError

AHEAD_SHARE = 0.5
"""Share of its part of the cache that a process fetches ahead; more would leave less for blocks that come again."""
MOST_SAMPLES_AHEAD = 2**20
"""Samples that are looked ahead at most: their places take 100 ms to sort."""
LEAST_SAMPLES = 4096
"""Samples that are looked up at least: a few cost nearly as much."""
PINNED_STEPS = 8
"""Steps that the loader may be reading."""
SPAN_BLOCKS = 16
"""Blocks that follow each other and are fetched by one request: 4 MiB, which 1 Gbit/s brings in 34 ms."""
CLOSING_S = 1.0
URGENT_STEPS = 16
"""Blocks that are needed within so many steps are fetched one by one: none waits for blocks that are needed later."""


class ReadAhead:
    """Keeps the cache filled for a loader.

    Args:
        cache: where blocks go.
        sources: the loader's, of which those in stores are fetched.
        seq_len: tokens of a sample.
        samples: returns this process's samples of steps `first` to `stop`, and the step of each.
        rows: the most samples of a step.
        step: the first that the loader reads.
    """

    def __init__(
        self,
        cache: Cache,
        sources: Sequence[TokenSource],
        seq_len: int,
        samples: Callable[[int, int], tuple[Samples, I64]],
        rows: int,
        step: int,
    ):
        self._cache, self._sources, self._seq_len, self._samples = cache, sources, seq_len, samples
        self._bases = np.cumsum([0, *(s.blocks if isinstance(s, StoreSource) else 0 for s in sources)])
        self._reader = Reader(cache)
        self._wake, self._closed, self._no_room = threading.Event(), threading.Event(), threading.Event()
        self._step, self._order, self._order_of_window = step, 0, -1
        self._rows = rows
        self._from = self._to = step  # the steps whose blocks are known
        self._blocks = self._steps = np.empty(0, np.int64)  # in the order of need, and the step of each
        self._pool, self._slots = ThreadPoolExecutor(FETCHES, "argosy-fetch"), threading.Semaphore(FETCHES)
        self._thread = threading.Thread(target=self._run, name="argosy-ahead", daemon=True)
        self._thread.start()

    def at(self, step: int) -> None:
        """Say that the loader is about to read `step`."""
        self._step = step
        self._wake.set()

    def forget(self) -> None:
        """Begin anew: the order of samples has changed."""
        self._order += 1
        self._wake.set()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join(CLOSING_S)  # a request may wait for a store that is away
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._reader.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            step, order = self._step, self._order
            until = self._fill(step, order)
            while not self._closed.is_set() and self._is_current(step, until, order):
                self._wake.wait(1.0)
                self._wake.clear()

    def _is_current(self, step: int, until: int, order: int) -> bool:
        """True if a plan from `step` to `until` still holds: the loader is there, and the order is the same."""
        return self._order == order and step <= self._step < until

    def _fill(self, step: int, order: int) -> int:
        """Plan from `step` on, and fetch what is missing while the plan holds; return the step of the next."""
        share = max(self._cache.blocks // max(self._cache.readers, 1), 1)
        blocks, steps = self._plan(step, share, order)
        dues = steps - step
        most = len(blocks) if self._total <= share else max(int(share * AHEAD_SHARE), 1)
        until = step + max(int(dues[:most][-1]) // 8, 1) if len(blocks) else step + 1
        with suppress(OSError):  # a full disk: others may take what this process needs, and it fetches that again
            self._reader.write(self._keys(blocks), dues.astype(np.uint32), until - step + PINNED_STEPS)
        is_here = np.concatenate([self._present(number) for number in range(len(self._sources))])
        missing = ~is_here[blocks[:most]]
        self._fetch(blocks[:most][missing], dues[:most][missing], lambda: self._is_current(step, until, order))
        return until

    @property
    def _total(self) -> int:
        return int(self._bases[-1])

    def _plan(self, step: int, most_blocks: int, order: int) -> tuple[I64, I64]:
        """Return the first `most_blocks` distinct blocks needed from `step` on, ordered by need, and in which step each
        is needed first.
        """
        if order != self._order_of_window or not self._from <= step <= self._to:
            self._from = self._to = step
            self._blocks = self._steps = np.empty(0, np.int64)
            self._order_of_window = order
        later = self._steps >= step
        self._from, self._blocks, self._steps = step, self._blocks[later], self._steps[later]
        while True:
            found, first = np.unique(self._blocks, return_index=True)
            if (
                len(found) >= min(most_blocks, self._total)
                or self._looked >= MOST_SAMPLES_AHEAD
                or self._closed.is_set()
            ):
                chosen = np.argsort(first)[:most_blocks]
                return found[chosen], self._steps[first[chosen]]
            self._look_further()

    @property
    def _looked(self) -> int:
        return (self._to - self._from) * self._rows

    def _look_further(self) -> None:
        """Look up as many samples again as were looked up."""
        more = min(max(self._looked, LEAST_SAMPLES), MOST_SAMPLES_AHEAD // 4)
        stop = self._to + max(more // self._rows, 1)
        samples, steps = self._samples(self._to, stop)
        parts, of_steps = [self._blocks], [self._steps]
        for number, source in enumerate(self._sources):
            here = np.flatnonzero(samples.sources == number)
            if isinstance(source, StoreSource) and here.size:
                blocks = source.blocks_of(samples.windows[here], self._seq_len)
                parts.append(blocks + self._bases[number])
                of_steps.append(np.repeat(steps[here], len(blocks) // here.size))
        blocks, all_steps = np.concatenate(parts), np.concatenate(of_steps)
        by_step = np.argsort(all_steps, kind="stable")
        self._to, self._blocks, self._steps = stop, blocks[by_step], all_steps[by_step]

    def _keys(self, blocks: I64) -> npt.NDArray[np.uint64]:
        keys = np.empty(len(blocks), np.uint64)
        for number, source in enumerate(self._sources):
            if isinstance(source, StoreSource):
                here = (blocks >= self._bases[number]) & (blocks < self._bases[number + 1])
                keys[here] = source.keys_of(blocks[here] - self._bases[number])
        return keys

    def _present(self, number: int) -> npt.NDArray[np.bool_]:
        source = self._sources[number]
        return source.present() if isinstance(source, StoreSource) else np.empty(0, bool)

    def _fetch(self, blocks: I64, dues: I64, is_current: Callable[[], bool]) -> None:
        """Fetch `blocks` in this order, as long as there is room and the plan holds."""
        wanted = dict(zip(blocks.tolist(), dues.tolist(), strict=True))
        self._no_room.clear()
        while wanted and self._may_go_on(is_current):
            span = self._span(wanted)
            number = int(np.searchsorted(self._bases, span[0], side="right")) - 1
            source = self._sources[number]
            assert isinstance(source, StoreSource)
            shard, first = source.place(span[0] - int(self._bases[number]))
            span = span[: shard.blocks - first]
            due = 1 + min(wanted.pop(block) for block in span)
            self._slots.acquire()
            if not self._may_go_on(is_current):
                self._slots.release()
                break
            self._pool.submit(self._fetch_span, source.store_folder, shard.shard, (first, first + len(span)), due)
        for _ in range(FETCHES):  # until all have come: the next plan asks what is here
            self._slots.acquire()
        self._slots.release(FETCHES)

    def _may_go_on(self, is_current: Callable[[], bool]) -> bool:
        return is_current() and not self._closed.is_set() and not self._no_room.is_set()

    @staticmethod
    def _span(wanted: dict[int, int]) -> list[int]:
        """Return the first of the wanted blocks, and those that follow it in its shard and are wanted too."""
        span = [next(iter(wanted))]
        if wanted[span[0]] > URGENT_STEPS:
            while len(span) < SPAN_BLOCKS and span[-1] + 1 in wanted:
                span.append(span[-1] + 1)
        return span

    def _fetch_span(self, folder: StoreFolder, shard: Shard, span: tuple[int, int], due: int) -> None:
        pauses = iter(STORE_PAUSES_S)
        try:
            while not self._closed.is_set():
                try:
                    if not folder.fetch(shard, *span, due).had_room:
                        self._no_room.set()
                    return
                except StoreUnreachable as problem:
                    folder.away(problem)
                    self._closed.wait(next(pauses, STORE_PAUSES_S[-1]))
        except ArgosyError:
            pass  # damaged there, or forbidden: whoever reads it says so
        finally:
            self._slots.release()
