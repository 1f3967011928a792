"""The rows of a step, read ahead; and a run's [data] section turned into sources, order and loader."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from argosy.config.schema import DataConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.order import SampleOrder, Samples, Stage
from argosy.data.stream import I32, TokenSource
from argosy.data.tokenizer import Tokenizer
from argosy.errors import UserError

AHEAD = 4
"""Steps that are read before they are asked for."""

LOCATED = 8192
"""Samples that are looked up in the order at once: a few cost nearly as much as thousands."""


class Loader:
    """One rank's rows of each step.

    Its whole state is the step that is asked for: a resumed run asks for the step that it resumes at, at
    whatever number of ranks.

    Args:
        sources: in the order that `order` knows them by.
        order: which sample comes when.
        seq_len: tokens of a sample; a row has one more, the last token's successor.
        global_batch: rows of a step over all ranks.
        rows: this rank's part of them.
    """

    def __init__(
        self, sources: Sequence[TokenSource], order: SampleOrder, seq_len: int, global_batch: int, rows: slice
    ):
        self._sources, self._order, self._seq_len = sources, order, seq_len
        self._global_batch = global_batch
        self._first, self._stop, stride = rows.indices(global_batch)
        self._steps_at_once = max(LOCATED // global_batch, 1)
        self._locate = lru_cache(2)(self._locate_steps)
        if stride != 1:
            raise ValueError(f"rows = {rows}: the rows of a rank are consecutive")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="argosy-data")
        self._coming: deque[tuple[int, Future[I32]]] = deque()

    def batch(self, step: int) -> I32:
        """Rows of step `step` (0-based), int32 [rows, seq_len + 1].

        Asked for in sequence, steps have been read by the time they are asked for.

        Raises: UserError if a shard is damaged where the step reads it.
        """
        if not self._coming or self._coming[0][0] != step:
            self._forget()
            self._read_ahead(step)
        _, rows = self._coming.popleft()
        self._read_ahead(self._coming[-1][0] + 1 if self._coming else step + 1)
        return rows.result()

    def close(self) -> None:
        """Stop reading ahead; the loader is of no use after that."""
        self._forget()
        self._thread.shutdown()

    def read(self, step: int) -> I32:
        """What `batch` returns, read now and in this thread."""
        samples = self._samples(step)
        out = np.empty((len(samples), self._seq_len + 1), np.int32)
        for number, source in enumerate(self._sources):
            here = np.flatnonzero(samples.sources == number)
            if here.size == len(out):
                source.read_windows(samples.windows, out)  # the usual case, without a copy
            elif here.size:
                part = np.empty((here.size, self._seq_len + 1), np.int32)
                source.read_windows(samples.windows[here], part)
                out[here] = part
        return out

    def _samples(self, step: int) -> Samples:
        """This rank's samples of a step."""
        block, place = divmod(step, self._steps_at_once)
        start = place * self._global_batch
        return self._locate(block)[start + self._first : start + self._stop]

    def _locate_steps(self, block: int) -> Samples:
        """All ranks' samples of consecutive steps."""
        size = self._steps_at_once * self._global_batch
        return self._order.samples(block * size, (block + 1) * size)

    def _read_ahead(self, step: int) -> None:
        while len(self._coming) <= AHEAD:
            self._coming.append((step, self._thread.submit(self.read, step)))
            step += 1

    def _forget(self) -> None:
        for _, rows in self._coming:
            rows.cancel()
        self._coming.clear()


@dataclass(frozen=True)
class OpenData:
    """The data of a run: all its sources, and the order that they are read in."""

    sources: tuple[TokenSource, ...]
    """Train splits; those of `data.sources`, then those that only stages name."""
    order: SampleOrder
    seq_len: int
    global_batch: int

    def loader(self, rows: slice) -> Loader:
        """A loader of these rows of every global batch."""
        return Loader(self.sources, self.order, self.seq_len, self.global_batch, rows)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all sources share."""
        return Tokenizer.load(self.sources[0].folder / TOKENIZER)

    @property
    def eod_id(self) -> int:
        """The token that ends every document."""
        return self.sources[0].manifest.eod_id

    @property
    def vocab_size(self) -> int:
        """Of the tokenizer."""
        return self.sources[0].manifest.vocab_size

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that change when what the samples are cut from does.

        Weights and stages are left out: to change them for the steps to come is what a resumed run may do.
        """
        parts = [str(self.seq_len), *(source.manifest.identity for source in self.sources)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def open_data(config: DataConfig, seed: int, global_batch: int) -> OpenData:
    """Open what a run's [data] section names; `config.prepare.out` if it names no sources.

    Raises: UserError if a folder is not prepared or shorter than one sample, or two have different tokenizers.
    """
    mixtures = [(0, config.sources or {str(config.prepare.out): 1.0})]
    mixtures += [(stage.from_step, stage.sources) for stage in config.stages]
    starts = [step for step, _ in mixtures]
    if starts != sorted(set(starts)):
        raise UserError(f"data.stages: from_step = {starts[1:]} must ascend. Put the stages in order of from_step")

    folders = list(dict.fromkeys(folder for _, weights in mixtures for folder in weights))
    sources = tuple(TokenSource(Path(folder)) for folder in folders)
    _check_same_tokenizer(sources)
    stages = [
        Stage(step * global_batch, tuple(weights.get(folder, 0.0) for folder in folders)) for step, weights in mixtures
    ]
    order = SampleOrder(seed, [source.windows(config.seq_len) for source in sources], stages)
    return OpenData(sources, order, config.seq_len, global_batch)


def _check_same_tokenizer(sources: Sequence[TokenSource]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if other.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
            raise UserError(
                f"data.sources: {first.folder} and {other.folder} were prepared with different tokenizers "
                f"({first.manifest.tokenizer_sha256[:12]}, {other.manifest.tokenizer_sha256[:12]}). Prepare one of "
                f"them again: argosy prepare --tokenizer {first.folder / TOKENIZER} --out {other.folder}"
            )
