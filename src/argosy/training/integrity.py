"""Checks for silent corruption: ranks compare what they hold and compute, and heal what differs.

In the replay check now and then other replicas compute one's loss and gradient again, and compare the bits. It is the
one check that sees a gradient that was computed wrongly, which summing over ranks spreads to all. One replica after the
other is checked; each step that is checked costs the others as much again as their own. With n replicas and a check
every k steps, each replica is checked in one of n k steps. With three replicas the third decides which is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.accelerator import is_accelerator
from argosy.errors import UserError
from argosy.parallel.world import World
from argosy.training.fingerprint import Corruption
from argosy.training.parts import Parts
from argosy.training.step import Checks

Result = tuple[float, int]
"""A replica's share of the loss, and the bits of its gradient."""


@dataclass(frozen=True)
class Disagreement:
    """A disagreement between replicas that computed from the same samples."""

    rank: int
    """The replica whose samples they were."""
    suspects: tuple[int, ...]
    """Ranks that may be wrong: one, if two others agree."""


def compare(turn: int, mine: Result, recompute: Callable[[int], Result], world: World) -> Disagreement | None:
    """Check the replica whose turn it is (`turn` modulo their number); all ranks call it, and get the same answer.

    `mine`: this rank's result from its own samples. `recompute(rank)`: its result from those of another. The next two
    ranks recompute, side by side.
    """
    checked = turn % world.size
    others = [(checked + i) % world.size for i in range(1, min(world.size, 3))]
    loss, bits = recompute(checked) if world.rank in others else mine
    as_bits = torch.tensor(loss, dtype=torch.float64).view(torch.int64).item()
    results = [torch.zeros(2, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    dist.all_gather(results, torch.tensor([as_bits, bits], device=world.device))
    found = {rank: tuple(results[rank].tolist()) for rank in (checked, *others)}
    (common, count), *rest = Counter(found.values()).most_common()
    if not rest:
        return None
    return Disagreement(checked, tuple(rank for rank, result in found.items() if count == 1 or result != common))


class Integrity(Checks):
    """One process's part of the checks. All processes call each method together, but for `suspect`."""

    def __init__(self, parts: Parts):
        every, device = parts.run.resilience.replay_check_every_steps, parts.world.device
        if every and is_accelerator(device) and not parts.run.train.deterministic:
            raise UserError(
                f"resilience.replay_check_every_steps = {every}: bits are only equal on {device.type} with "
                "train.deterministic = true. Set it, or 0 here."
            )
        super().__init__(parts.run, parts.state, parts.world)
        self._state, self._batches, self._world = parts.state, parts.batches, parts.world
        self._records, self._clock, self._heartbeat = parts.records, parts.clock, parts.heartbeat
        self._replay_check_every = every
        self._tokens: int | Tensor = 1

    def watch(self, tokens: int | Tensor) -> None:
        """Compute the step at hand such that it can be checked."""
        self._tokens = tokens
        self._state.model.watch(self._is_replayed)

    def is_wrong(self, step: int, loss: Tensor) -> bool:
        """True if this process knows that the step's gradient was summed or computed wrongly."""
        with self._clock.time("communication"):  # on a GPU the host waits for the sums
            is_sound = not super().is_wrong(step, loss)
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
        return self._state.model.recompute(batch, self._state.scaler.scale, self._tokens)

    @property
    def _is_replayed(self) -> bool:
        """True if replicas compute each other's gradients in the step at hand."""
        return bool(self._replay_check_every) and self._state.step % self._replay_check_every == 0
