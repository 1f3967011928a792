"""A rank's share of each step's samples: which they are, what is skipped, and what is done with unreadable ones.

Preferences compare with the log-probabilities of answers before training (`Reference`), which are computed once and
kept with the run. The starting weights score all rows before the first step, so no second model is in memory
afterwards. A run that goes on reads the file; what is in it does not depend on the layout but for rounding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from argosy.config.schema import RunConfig
from argosy.data.loader import Loader, OpenData
from argosy.data.order import Range, Samples, kept, skipped_by
from argosy.data.shards import BadShard, Place, TokenSource
from argosy.errors import RunFailed
from argosy.files import atomic_write
from argosy.models.decoder import Microbatch
from argosy.observe.events import Events
from argosy.observe.heartbeat import Heartbeat
from argosy.observe.screen import Progress
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World, node_of_each_rank
from argosy.plan.plan import Plan
from argosy.sync.deal import SiteOrder
from argosy.training.rows import compared_microbatches, microbatches_of, scores_of_rows, with_mask_keys
from argosy.training.state import TrainState


class Batches:
    """Reads the samples of the next steps of `state` ahead, without those that it skips."""

    def __init__(self, run: RunConfig, plan: Plan, data: OpenData, state: TrainState, world: World, events: Events):
        self._run, self._plan, self._data, self._state = run, plan, data, state
        self._world, self._events = world, events
        self._site = data.order if isinstance(data.order, SiteOrder) else None
        self._global_batch = sum(site.batch for site in run.sites) or run.train.global_batch
        self._loader = data.loader(self._rows_of(state.model.dp_rank))
        self._found_bad: list[Place] = []
        self.references: References | None = None
        """Reference values of the answers, if the objective compares with them."""
        self._counted = data.cache_counts()

    def read(self, step: int, while_waiting: Callable[[], None] = lambda: None) -> list[Microbatch]:
        """Return this rank's share of the step's samples. `while_waiting` is called while a store is waited for.

        Raises: BadShard if one cannot be read, and data.on_bad_shard = "stop"; Retryable if a store is away for long.
        """

        def waiting() -> None:
            self._tell(step)
            while_waiting()

        rows = self._read(step, waiting)
        self._tell(step)
        return self._microbatches(rows, self._loader, step, self._state.model.dp_rank)

    def of_rank(self, rank: int, step: int) -> list[Microbatch]:
        """Return the share of data-parallel rank `rank`."""
        loader = self._loader.of(self._rows_of(rank))
        rows = loader.read(step)
        loader.close()
        return self._microbatches(rows, loader, step, rank)

    def samples(self, step: int) -> list[Range]:
        """Return the ranges of the step's samples, those of all ranks, among all samples."""
        if self._site is not None:
            return self._site.numbers(*self._numbers(step))
        return kept(*self._numbers(step), self._state.skipped)

    def stage(self, step: int) -> int:
        """Return the number of the mixture that the step's first sample comes from."""
        if self._site is not None:
            starts = [stage.from_step * self._global_batch for stage in self._run.data.stages]
        else:
            starts = [self._run.train.batches.before(stage.from_step) for stage in self._run.data.stages]
        return bisect_right(starts, self.samples(step)[0][0])

    def line(self, step: int) -> dict[str, Any]:
        """Return what the step's line of metrics says of its samples (`chaos.run`)."""
        if self._site is not None:
            return {"sample_ranges": [list(some) for some in self.samples(step)]}
        line: dict[str, Any] = {"first_sample": self.samples(step)[0][0], "samples": self._run.train.batches.at(step)}
        if skipped := skipped_by(*self._numbers(step), self._state.skipped):
            line["samples_skipped"] = [list(samples) for samples in skipped]
        return line

    def cache_line(self) -> dict[str, Any]:
        """Return what a line says of the cache of object stores, since the call before; {} without stores."""
        before, self._counted = self._counted, self._data.cache_counts()
        return {"cache": {name: count - before[name] for name, count in self._counted.items()}} if before else {}

    def skip(self, step: int) -> None:
        """Make no update from the step's samples, now or later."""
        skipped = [self._numbers(step)] if self._site is not None else self.samples(step)
        self._state.skipped = (*self._state.skipped, *skipped)
        self.follow()

    def follow(self) -> None:
        """Skip the samples that the state skips: they have changed."""
        if self._site is None:
            self._loader.skip(self._state.skipped)
        elif self._site.skipped != self._state.skipped:
            self._site.skipped = self._state.skipped  # a site's samples stay where they are: others stand in for them
            self.again()

    def again(self) -> None:
        """Look up again which samples come: what is dealt to this site has changed."""
        self._loader.again()

    def skipped_numbers(self, first: int, end: int) -> list[Range]:
        """Return the run's numbers of those of a site's samples `first` to `end` that no update was made from."""
        assert self._site is not None
        return self._site.replaced(first, end)

    @property
    def are_unreadable(self) -> bool:
        """True if this rank found a bad shard: what it computes from the batch read last has to be dropped."""
        return bool(self._found_bad)

    def quarantine(self) -> None:
        """Read no more from shards that any rank has found to be bad; all ranks call it together."""
        self._loader.quarantine(place for found in self._world.gather(self._found_bad, list[Place]) for place in found)
        self._found_bad = []

    def replan(self, plan: Plan) -> None:
        """Deal the rows of the next steps out as the shares of `plan` say; it differs in nothing else."""
        before, self._plan = self._loader, plan
        self._loader = before.of(self._rows_of(self._state.model.dp_rank))
        before.close()

    def close(self) -> None:
        """Read no more."""
        self._loader.close()

    def _tell(self, step: int) -> None:
        """Write down what has happened with stores."""
        for name, facts in self._data.news():
            self._events.write(name, step=step, **facts)

    def _read(self, step: int, while_waiting: Callable[[], None]) -> np.ndarray:
        try:
            rows = self._loader.batch(step, while_waiting)
        except BadShard as problem:
            skips = self._run.data.on_bad_shard == "skip"
            facts = {"samples": [list(some) for some in self.samples(step)], "problem": str(problem)}
            self._events.write("bad_shard", step=step, **facts, outcome="quarantined" if skips else "stop")
            if not skips:
                raise
            # All ranks have to go through the step before all can know of it.
            self._found_bad = [problem.place]
            return self._loader.stand_in(step, 1 if self._data.eod_id == 0 else 0)
        if replaced := self._loader.replaced(step):
            self._events.write("samples_replaced", step=step, samples=replaced)
        return rows

    def _rows_of(self, rank: int) -> slice:
        return self._plan.rows_of(rank, self._run.train.global_batch)

    def _microbatches(self, rows: np.ndarray, loader: Loader, step: int, rank: int) -> list[Microbatch]:
        train, device, size = self._run.train, self._world.device, self._plan.microbatch
        if train.has_preferences:
            known = None if self.references is None else self.references.of(loader.places(step))
            micros = compared_microbatches(rows, size, device, train.objective == "kto", known)
        else:
            micros = microbatches_of(rows, size, self._data.eod_id, device)
        return with_mask_keys(micros, self._run, step, self._rows_of(rank).start)

    def _numbers(self, step: int) -> Range:
        """Return the range of the step's samples, counted without those that are skipped."""
        return self._run.train.batches.before(step), self._run.train.batches.before(step + 1)


Table = np.ndarray
"""A table of one source: fp32 [windows, most answers of a row]."""


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
        return scores_of_rows(self._model, windows, read, *how, is_judged=self._is_judged)[..., 0].copy()

    def _summed(self, table: Table) -> Table:
        return self._world.sum(torch.from_numpy(table).to(self._world.device)).cpu().numpy()
