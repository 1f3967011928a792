"""Reads the rows of steps ahead, and turns a run's [data] section into sources, order and loader."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy.config.data import DataConfig
from argosy.config.train import BatchSizes
from argosy.data.chat_template import ChatTemplate
from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.order import I64, MixtureStage, Order, Range, SampleOrder, Samples, kept, key_of
from argosy.data.shards import I32, Place, TokenSource
from argosy.data.stores.ahead import ReadAhead
from argosy.data.stores.cache import Cache
from argosy.data.stores.source import open_source, stores_of
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import Tokenizer, how_to_prepare
from argosy.errors import DataError, UserError
from argosy.faults import fault

WAITED_S = 1.0
"""Seconds between two lines of a loader that waits for a store."""
STEPS_AHEAD = 4
"""Steps that are read ahead."""

REPLACEMENT_TRIES = 1000
"""Windows that are tried as a replacement for a bad one."""

LOCATED = 8192
"""Samples looked up in the order at once: a few cost nearly as much as thousands."""


class Loader:
    """Reads one rank's rows of each step.

    Its whole state is the step that is asked for, and the samples to skip: a resumed run, on any number of ranks, asks
    for the step at which it resumes. Bad shards are found again when they are read again.

    Args:
        sources: the sources, ordered as in `order`.
        order: which sample comes when.
        seq_len: tokens of a sample; a row has one more, the last token's successor.
        batches: rows of each step over all ranks.
        rows: this rank's part of the rows of a step with the largest batch; of a smaller one it has the same share.
    """

    def __init__(self, sources: Sequence[TokenSource], order: Order, seq_len: int, batches: BatchSizes, rows: slice):
        self._sources, self._order, self._seq_len = sources, order, seq_len
        self._batches = batches
        self._first, self._stop, stride = rows.indices(batches.largest)
        self._skipped: tuple[Range, ...] = ()
        self._bad: dict[str, set[int]] = {}
        self._at_once = max(LOCATED // batches.largest, 1) * batches.largest
        self._locate = lru_cache(2)(self._locate_block)
        if stride != 1:
            raise ValueError(f"rows = {rows}: the rows of a rank are consecutive")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="argosy-data")
        self._coming: deque[tuple[int, Future[I32]]] = deque()
        self._ahead: ReadAhead | None = None

    def batch(self, step: int, while_waiting: Callable[[], None] = lambda: None) -> I32:
        """Return the rows of step `step` (0-based), int32 [rows, seq_len + 1].

        Steps asked for in sequence are read ahead. `while_waiting` is called every second while a store is waited for.

        Raises: BadShard if a shard is damaged where the step reads it; Retryable if a store is away for too long.
        """
        self._fetch_ahead(step)
        if not self._coming or self._coming[0][0] != step:
            self._forget()
            self._read_ahead(step)
        _, rows = self._coming.popleft()
        self._read_ahead(self._coming[-1][0] + 1 if self._coming else step + 1)
        while self._ahead is not None and not wait([rows], WAITED_S).done:
            while_waiting()
        return rows.result()

    def skip(self, samples: Sequence[Range]) -> None:
        """Leave these samples out from now on. Each step takes the next of the remaining samples."""
        if tuple(samples) != self._skipped:
            self._forget()
            self._skipped = tuple(samples)
            if self._ahead is not None:
                self._ahead.forget()

    def again(self) -> None:
        """Look the samples up again: the order has changed from some step on."""
        self._forget()
        self._locate = lru_cache(2)(self._locate_block)  # a read under way puts what it finds into the one before
        if self._ahead is not None:
            self._ahead.forget()

    def quarantine(self, shards: Iterable[Place]) -> None:
        """Stop reading these shards (`BadShard.place`). Each window that overlaps one is replaced by another window of
        the same source.

        The choice depends on the sample's number and on the place of the shard, not on when it was found to be bad.
        """
        self._forget()
        for folder, shard in shards:
            self._bad.setdefault(folder, set()).add(shard)

    def replaced(self, step: int) -> list[int]:
        """Return the numbers of this rank's samples of a step that are replaced by others."""
        numbers, samples = self._numbers(step), self.samples(step)
        return numbers[self._is_bad(samples.sources, samples.windows)].tolist() if self._bad else []

    def places(self, step: int) -> Samples:
        """Return the places of this rank's samples of a step, as they are read."""
        return self._sound(step, self.samples(step))

    def stand_in(self, step: int, token: int) -> I32:
        """Return rows filled with `token`, in place of rows of a step that cannot be read."""
        first, stop = self._share(step)
        return np.full((stop - first, self._seq_len + 1), token, np.int32)

    def close(self) -> None:
        """Stop reading ahead. The loader cannot be used after that."""
        if self._ahead is not None:
            self._ahead.close()
        self._forget()
        self._thread.shutdown(wait=self._ahead is None)  # it may be waiting for a store

    def of(self, rows: slice) -> Loader:
        """Return the loader of another rank, which skips and replaces the same samples as this one."""
        other = Loader(self._sources, self._order, self._seq_len, self._batches, rows)
        other._skipped, other._bad = self._skipped, self._bad
        return other

    def read(self, step: int) -> I32:
        """Read what `batch` returns, now and in this thread."""
        fault("loader", step=step)
        samples = self._sound(step, self.samples(step))
        out = np.empty((len(samples), self._seq_len + 1), np.int32)
        for number, source in enumerate(self._sources):
            here = np.flatnonzero(samples.sources == number)
            if here.size == len(out):
                source.read_windows(samples.windows, out)  # the usual case, which copies nothing
            elif here.size:
                part = np.empty((here.size, self._seq_len + 1), np.int32)
                source.read_windows(samples.windows[here], part)
                out[here] = part
        return out

    def _ranges(self, step: int) -> list[Range]:
        """Return the numbers of this rank's samples of a step, as ranges."""
        start, (first, stop) = self._batches.before(step), self._share(step)
        return kept(start + first, start + stop, self._skipped)

    def _share(self, step: int) -> Range:
        """Return this rank's rows among those of a step. Plans deal out every batch evenly (`plan.rules`)."""
        batch, largest = self._batches.at(step), self._batches.largest
        return self._first * batch // largest, self._stop * batch // largest

    def _numbers(self, step: int) -> I64:
        return np.concatenate([np.arange(first, stop) for first, stop in self._ranges(step)])

    def samples(self, step: int) -> Samples:
        """Return the places of this rank's samples of a step."""
        parts = [part for first, stop in self._ranges(step) for part in self._located(first, stop)]
        return Samples.joined(parts)

    def _sound(self, step: int, samples: Samples) -> Samples:
        """Replace the bad ones among `samples`, those of a step."""
        if not self._bad:
            return samples
        windows = samples.windows.copy()
        bad = np.flatnonzero(self._is_bad(samples.sources, windows))
        for row, number in zip(bad.tolist(), self._numbers(step)[bad].tolist(), strict=True):
            source = samples.sources[row : row + 1]
            n = self._sources[int(source[0])].windows(self._seq_len)
            draws = (np.array([key_of("in place of", number, draw) % n]) for draw in range(REPLACEMENT_TRIES))
            found = next((window for window in draws if not self._is_bad(source, window)[0]), None)
            if found is None:
                folder = self._sources[int(source[0])].name
                raise DataError(f"{folder}: hardly any shard of it is whole. Prepare it again: argosy prepare")
            windows[row] = found[0]
        return Samples(samples.sources, samples.epochs, windows)

    def _is_bad(self, sources: I64, windows: I64) -> npt.NDArray[np.bool_]:
        """Return True for each window that overlaps a shard known to be bad."""
        bad = np.zeros(windows.shape, bool)
        for number, source in enumerate(self._sources):
            if shards := self._bad.get(source.name):
                bad |= (sources == number) & source.in_shards(windows, self._seq_len, shards)
        return bad

    def _located(self, start: int, stop: int) -> Iterator[Samples]:
        """Return samples `start` to `stop`, block by block; usually one block has them all."""
        while start < stop:
            block, place = divmod(start, self._at_once)
            end = min(stop, (block + 1) * self._at_once)
            yield self._locate(block)[place : place + end - start]
            start = end

    def _locate_block(self, block: int) -> Samples:
        return self._order.samples(block * self._at_once, (block + 1) * self._at_once)

    def _fetch_ahead(self, step: int) -> None:
        """Have the blocks of the steps from `step` on fetched, if sources are in stores."""
        if self._ahead is not None:
            self._ahead.at(step)
        elif stores := stores_of(self._sources):
            self._ahead = ReadAhead(
                stores[0].cache, self._sources, self._seq_len, self.samples_of_steps, self._stop - self._first, step
            )

    def samples_of_steps(self, first: int, stop: int) -> tuple[Samples, I64]:
        """Return the places of this rank's samples of steps `first` to `stop`, and the step of each."""
        before, largest = self._batches.before, self._batches.largest
        parts = kept(before(first), before(stop), self._skipped)
        found = Samples.joined([self._order.samples(*some) for some in parts])
        batches = np.array([self._batches.at(step) for step in range(first, stop)])
        low, high = self._first * batches // largest, self._stop * batches // largest
        starts, counts = np.cumsum(batches) - batches + low, high - low
        rows = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        steps = np.repeat(np.arange(first, stop), counts)
        return Samples(found.sources[rows], found.epochs[rows], found.windows[rows]), steps

    def _read_ahead(self, step: int) -> None:
        while len(self._coming) <= STEPS_AHEAD:
            self._coming.append((step, self._thread.submit(self.read, step)))
            step += 1

    def _forget(self) -> None:
        for _, rows in self._coming:
            rows.cancel()
        self._coming.clear()


@dataclass(frozen=True)
class OpenData:
    """The data of a run: its sources, and the order in which they are read."""

    sources: tuple[TokenSource, ...]
    """Train splits: those of `data.sources`, then those that only stages name."""
    order: Order
    seq_len: int
    batches: BatchSizes

    @property
    def global_batch(self) -> int:
        """Rows of the largest step."""
        return self.batches.largest

    def loader(self, rows: slice) -> Loader:
        return Loader(self.sources, self.order, self.seq_len, self.batches, rows)

    @property
    def folders(self) -> list[Path]:
        """The folders of the sources' manifests; of a source in a store, the one in the cache."""
        return [source.folder for source in self.sources]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all sources share."""
        return Tokenizer.load(self.sources[0].folder / TOKENIZER)

    @property
    def eod_id(self) -> int:
        """The token that ends every document."""
        return self.sources[0].manifest.eod_id

    @property
    def filler(self) -> int:
        """A token that ends no document, for rows in place of those that cannot be read."""
        return 1 if self.eod_id == 0 else 0

    @property
    def vocab_size(self) -> int:
        return self.sources[0].manifest.vocab_size

    @property
    def least_vocab_size(self) -> int:
        """The least vocabulary of a model that reads them: templates of conversations write special tokens too."""
        templates = [ChatTemplate.load(f).spellings() for f in self.folders if (f / TEMPLATE).is_file()]
        special = self.tokenizer.special_tokens.items()
        written = [number for token, number in special if any(token in text for text in templates)]
        return max(self.tokenizer.least_vocab_size, *(number + 1 for number in (0, *written)))

    def news(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what has happened with stores since the last call: the names of events, and their facts."""
        for folder in stores_of(self.sources):
            while folder.news:
                yield folder.news.popleft()

    def cache_counts(self) -> dict[str, int]:
        """Return what this process has read from the cache of object stores so far, and fetched; {} without stores.

        hits, misses: blocks that were there when they were read, or had to be waited for. fetched_bytes: ahead too.
        """
        folders = {id(folder): folder for folder in stores_of(self.sources)}.values()
        names = ("hits", "misses", "fetched_bytes") if folders else ()
        return {name: sum(getattr(folder, name) for folder in folders) for name in names}

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that change when the tokens behind the samples change.

        Weights and stages are left out: a resumed run may change them for the steps to come.
        """
        parts = [str(self.seq_len), *(source.manifest.identity for source in self.sources)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def open_data(config: DataConfig, seed: int, batch: int | BatchSizes) -> OpenData:
    """Open the sources in a run's [data] section; `config.prepare.out` if it names none.

    batch: rows of every step, or of each.

    Raises: UserError if a folder is not prepared or shorter than one sample, or two have different tokenizers;
    DataError if a shard is missing or cut off, unless config.on_bad_shard is "skip".
    """
    batches = BatchSizes(batch) if isinstance(batch, int) else batch
    if not config.sources:
        config = config.model_copy(update={"sources": {str(config.prepare.out): 1.0}})
    mixtures = [(0, config.sources)]
    mixtures += [(stage.from_step, stage.sources) for stage in config.stages]
    starts = [step for step, _ in mixtures]
    if starts != sorted(set(starts)):
        raise UserError(f"data.stages: from_step = {starts[1:]} must ascend. Put the stages in order of from_step.")

    folders = config.folders
    check_shards = config.on_bad_shard == "stop"
    cache = Cache(config.cache) if any(map(is_url, folders)) else None
    sources = tuple(open_source(folder, "train", check_shards, cache) for folder in folders)
    _check_same_tokenizer(sources)
    stages = [
        MixtureStage(batches.before(step), tuple(weights.get(folder, 0.0) for folder in folders))
        for step, weights in mixtures
    ]
    order = SampleOrder(seed, [source.windows(config.seq_len) for source in sources], stages)
    return OpenData(sources, order, config.seq_len, batches)


def _check_same_tokenizer(sources: Sequence[TokenSource]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if other.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            raise UserError(
                f"data.sources: {first.name} and {other.name} were prepared with different tokenizers "
                f"({first.manifest.tokenizer_sha256[:12]}, {other.manifest.tokenizer_sha256[:12]}). Prepare the "
                f"text of one again with the tokenizer of the other: {how_to_prepare(first.folder)}"
            )
