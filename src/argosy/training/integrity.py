"""Checks for silent corruption: ranks compare what they hold and compute, and heal what differs."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import Tensor

from argosy.training.fingerprint import Corruption
from argosy.training.parts import Parts
from argosy.training.replay_check import Result, check_can_replay, compare
from argosy.training.step import Checks


class Integrity(Checks):
    """One process's part of the checks. All processes call each method together, but for `suspect`."""

    def __init__(self, parts: Parts):
        check_can_replay(parts.run, parts.plan, parts.world.device)
        super().__init__(parts.run, parts.state, parts.world)
        self._state, self._batches, self._world = parts.state, parts.batches, parts.world
        self._records, self._clock, self._heartbeat = parts.records, parts.clock, parts.heartbeat
        self._replay_check_every = parts.run.resilience.replay_check_every_steps
        self._tokens_at = parts.run.tokens_at

    def watch(self) -> None:
        """Compute the step at hand such that it can be checked."""
        self._state.model.watch(self._is_replayed)

    def is_wrong(self, step: int, loss: Tensor) -> bool:
        """True if this process knows that the step's gradient was summed or computed wrongly."""
        with self._clock.time("communication"):  # on a GPU the host waits for the sums
            is_sound = self._state.model.sums_are_sound()
        if not is_sound:
            self._records.events.write("collective_corrupt", step=step, rank=self._world.rank)
            self.suspect([self._world.rank])
        if not self._is_replayed:
            return not is_sound
        with self._clock.time("check"), self._records.progress.during("checking by replay"):
            mine = loss.item(), self._state.model.bits()
            found = compare(step // self._replay_check_every, mine, partial(self._recompute, step), self._world)
        if found is not None:
            self._records.tell("gradient_corrupt", step=step, rank=found.rank, suspects=list(found.suspects))
            self._records.progress.say(
                f" step {step}: other ranks get another gradient than rank {found.rank}; suspects: {found.suspects}",
                "yellow",
            )
            self.suspect(found.suspects)
        return found is not None or not is_sound

    def replicas_differ(self) -> bool:
        """True if replicas of the state differ now, whether a comparison is due or not."""
        return bool(self._fingerprint_every) and self._fingerprints.differ()

    def heal(self) -> tuple[list[Corruption], bool]:
        """Heal replicas that differ from a majority.

        Returns what was found, and True if all is well now: False if there is no telling which replicas are right.
        """
        found = self._fingerprints.find()
        heals = all(corrupt.healthy is not None for corrupt in found)
        outcome = "healed" if heals else "rolled_back"
        step = self._state.step
        for corrupt in found:
            facts = {"tensor": corrupt.name, "ranks": list(corrupt.ranks), "healthy_rank": corrupt.healthy}
            self._records.tell("corruption", step=step, **facts, outcome=outcome)
            what = f"{corrupt.name} of rank {', '.join(map(str, corrupt.ranks))}"
            self._records.progress.say(f" step {step}: {what} is corrupt: {outcome.replace('_', ' ')}", "yellow")
        if not found:  # they are equal by now: a sum was wrong, or the difference is gone
            self._records.tell("corruption", step=step, outcome="gone")
        elif heals:
            self._state.in_update = True
            self._fingerprints.heal(found)
            self._state.in_update = False
        return found, heals

    def suspect(self, ranks: Collection[int]) -> None:
        """Show that this process is or may be to blame, if it is one of `ranks`: its node is checked then."""
        if self._world.rank in ranks:
            self._heartbeat.suspect()

    def _recompute(self, step: int, rank: int) -> Result:
        """Return loss and gradient of the samples of another replica, `rank`."""
        batch = self._batches.of_rank(rank, step)
        return self._state.model.recompute(batch, self._state.scaler.scale, self._tokens_at(step))

    @property
    def _is_replayed(self) -> bool:
        """True if replicas compute each other's gradients in the step at hand."""
        return bool(self._replay_check_every) and self._state.step % self._replay_check_every == 0
