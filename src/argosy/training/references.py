"""The log-probabilities of answers before training, which preferences compare with: computed once, kept with the run.

The starting weights score all rows before the first step, so no second model is in memory afterwards. A run that goes
on reads the file; what is in it does not depend on the layout but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from argosy.data.loader import OpenData
from argosy.data.order import Samples
from argosy.data.shards import TokenSource
from argosy.errors import RunFailed
from argosy.files import atomic_write
from argosy.observe.heartbeat import Heartbeat
from argosy.observe.screen import Progress
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World, node_of_each_rank
from argosy.training.answers import answer_scores

Table = np.ndarray
"""Of one source: fp32 [windows, most answers of a row]."""


class References:
    """The tables of all sources of a run."""

    def __init__(self, tables: Sequence[Table]):
        self._tables = tables

    def of(self, samples: Samples) -> np.ndarray:
        """Return the log-probabilities of the answers of these samples, fp32 [samples, most answers]."""
        most = max(table.shape[1] for table in self._tables)
        found = np.zeros((len(samples), most), np.float32)
        for number, table in enumerate(self._tables):
            here = np.flatnonzero(samples.sources == number)
            found[here, : table.shape[1]] = table[samples.windows[here]]
        return found


class ReferenceScorer:
    """Computes the tables of a run, or reads those that it has computed. All ranks call it together."""

    def __init__(
        self,
        model: ParallelModel,
        data: OpenData,
        world: World,
        run_dir: Path,
        microbatch: int,
        is_judged: bool,
        heartbeat: Heartbeat,
        progress: Progress,
    ):
        self._model, self._data, self._world = model, data, world
        self._microbatch, self._is_judged = microbatch, is_judged
        self._heartbeat, self._progress = heartbeat, progress
        self.path = run_dir / f"reference-{data.identity}.npz"

    def references(self, steps_done: int) -> References:
        """Return what is known, or score all rows with the weights as they are.

        Raises: RunFailed if the file is gone, and the weights are not those of the start any more.
        """
        holders = self._world.gather(self.path.exists(), bool)
        if any(holders):
            return References(self._shared(holders.index(True)))
        if steps_done:
            raise RunFailed(
                f"{self.path} is gone: the log-probabilities of the model before training. Restore the file, or begin "
                "a new run from the weights that this one began with."
            )
        tables = [self._scored(source) for source in self._data.sources]
        nodes = node_of_each_rank(self._world)
        is_first_on_node = nodes.index(nodes[self._world.rank]) == self._world.rank
        for writes in (self._world.is_first, is_first_on_node):  # then other machines, if they do not see it
            if writes and not self.path.exists():
                with atomic_write(self.path) as file:
                    np.savez(file, *tables)
            self._world.barrier()
        return References(tables)

    def _shared(self, holder: int) -> list[Table]:
        """Return the tables that rank `holder` has in its folder."""
        mine = self._world.rank == holder
        tables = []
        if mine:
            with np.load(self.path, allow_pickle=False) as file:
                tables = [file[f"arr_{number}"] for number in range(len(self._data.sources))]
        shapes = self._world.gather([list(table.shape) for table in tables], list[list[int]])[holder]
        held = tables or [np.zeros(shape, np.float32) for shape in shapes]
        return [self._summed(table) for table in held]

    def _scored(self, source: TokenSource) -> Table:
        seq_len = self._data.seq_len
        windows = source.windows(seq_len)

        def read(chosen: np.ndarray) -> np.ndarray:
            rows = np.empty((len(chosen), seq_len + 1), np.int32)
            source.read_windows(chosen, rows)
            return rows

        def before_batch(number: int, batches: int) -> None:
            self._heartbeat.advance()
            self._progress.doing(f"scoring answers before training, batch {number} of {batches}")

        how = (self._microbatch, self._world, before_batch)
        return answer_scores(self._model, windows, read, *how, is_judged=self._is_judged)[..., 0].copy()

    def _summed(self, table: Table) -> Table:
        return self._world.sum(torch.from_numpy(table).to(self._world.device)).cpu().numpy()
