"""A rank's share of each step's samples: which they are, what is skipped, and what is done with unreadable ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np

from argosy.config.schema import RunConfig
from argosy.data.loader import Loader, OpenData
from argosy.data.order import Range, kept, skipped_by
from argosy.data.shards import BadShard, Place
from argosy.models.microbatch import Microbatch, compared_microbatches, microbatches, with_mask_keys
from argosy.observe.events import Events
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.sync.deal import SiteOrder
from argosy.training.rows import References
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
        try:
            rows = loader.read(step)
        except BadShard:
            if not self._skips_bad_shards:
                raise
            rows = loader.stand_in(step, self._data.filler)  # as that rank does
        finally:
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
            return bisect_right(starts, self._site.first_dealt(step))
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

    def compare_with(self, references: References) -> None:
        """Have these values beside the answers, and read no more from shards without any."""
        self.references = references
        self._loader.quarantine(references.unread)
        for folder, shard in references.unread if self._world.is_first else ():
            problem = f"shard {shard} of {folder} could not be read when the answers were scored"
            self._events.write("bad_shard", step=self._state.step, samples=[], problem=problem, outcome="quarantined")

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
            skips = self._skips_bad_shards
            facts = {"samples": [list(some) for some in self.samples(step)], "problem": str(problem)}
            self._events.write("bad_shard", step=step, **facts, outcome="quarantined" if skips else "stop")
            if not skips:
                raise
            # All ranks have to go through the step before all can know of it.
            self._found_bad = [problem.place]
            return self._loader.stand_in(step, self._data.filler)
        if replaced := self._loader.replaced(step):
            self._events.write("samples_replaced", step=step, samples=replaced)
        return rows

    @property
    def _skips_bad_shards(self) -> bool:
        return self._run.data.on_bad_shard == "skip"

    def _rows_of(self, rank: int) -> slice:
        return self._plan.rows_of(rank, self._run.train.global_batch)

    def _microbatches(self, rows: np.ndarray, loader: Loader, step: int, rank: int) -> list[Microbatch]:
        train, device, size = self._run.train, self._world.device, self._plan.microbatch
        if train.has_preferences:
            known = None if self.references is None else self.references.of(loader.places(step))
            micros = compared_microbatches(rows, size, device, train.objective == "kto", known)
        else:
            micros = microbatches(rows, size, self._data.eod_id, device)
        first_row = self._plan.rows_of(rank, train.batches.at(step)).start
        return with_mask_keys(micros, self._run, step, first_row + (self._site.first_row if self._site else 0))

    def _numbers(self, step: int) -> Range:
        """Return the range of the step's samples, counted without those that are skipped."""
        return self._run.train.batches.before(step), self._run.train.batches.before(step + 1)
