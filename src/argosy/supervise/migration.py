"""Migration: the run goes on without a slow node, or under another plan where a link became slow or the layers of
pipeline stages do not fit their speed, if that pays.

Detectors name the slow node or link, or the speed of stages. A spare node replaces a slow one if there is one; else the
planner predicts (`resilience.replanner`, in a process of its own) the step time now and under other plans. If a
migration pays, all ranks are told to hold after a step, with their state where others can take it over; once they do,
the generation is ended, and no step is lost. Migrations are at least `APART_S` apart, and one that did not make steps
faster is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from argosy.config.schema import ResilienceConfig
from argosy.observe.events import Events
from argosy.plan.plan import Plan
from argosy.processes.child import ChannelClosed, Child
from argosy.resilience.detect.finding import Finding
from argosy.resilience.replanner import MigrationAnswer, MigrationQuestion
from argosy.supervise.membership import Membership
from argosy.supervise.watch import RunWatch

PLANNER = "argosy.resilience.replanner"
APART_S = 300.0
"""Shortest time between two migrations."""
MIGRATION_S = 60.0
"""Assumed cost of a migration before this coordinator has seen a world begin."""
GAINED = 0.05
"""Share of the step time that a migration must save to count as a success."""
HOLD_WITHIN_S = 120.0
"""Time that all ranks may take to hold. One that makes no step then, as its site waits for others, holds after it."""


@dataclass
class _Case:
    """A slow node or link, or the speed of stages, that was found in one generation."""

    generation: int
    finding: Finding
    leave_out: tuple[str, ...]
    """Nodes that a migration would leave out."""
    question: MigrationQuestion
    asked: Child | None = None
    answer: MigrationAnswer | None = None
    """Set once the run is to migrate."""
    hold_until_s: float = 0.0
    late_step: int | None = None
    """The step that the ranks were in when that time had passed."""

    @property
    def key(self) -> tuple[str, ...]:
        return (self.question.kind, self.question.plan, *self.leave_out)


class Migrator:
    """Decide on migrations for one coordinator, whose loop it never blocks."""

    def __init__(
        self,
        run_dir: Path,
        membership: Membership,
        watch: RunWatch,
        hold: Callable[[int, bool], None],
        config: ResilienceConfig,
    ):
        """`hold` tells the workers of a generation to hold, and whether to save on disk before."""
        self._run_dir, self._membership, self._watch, self._hold = run_dir, membership, watch, hold
        self._is_on = config.migrate
        self._may_leave = 1 if config.memory_checkpoint_every_steps else 0
        """Nodes that may leave with parts of the state: an in-memory checkpoint is on two nodes each."""
        self._events = Events(run_dir, "coordinator")
        self._case: _Case | None = None
        self._migration_s, self._joined_s = MIGRATION_S, 0.0
        self._awaits_step = False
        self._not_before_s = 0.0
        self._in_vain: set[tuple[str, ...]] = set()
        self._made: tuple[_Case, int] | None = None

    def joined(self, now_s: float) -> None:
        """A world was told to join."""
        self._joined_s, self._awaits_step = now_s, True

    def slow_node(self, name: str, finding: Finding) -> None:
        """Take in that a node, with the ranks of `finding`, slows the others down."""
        membership = self._membership
        left = membership.room_without(name)
        if left:
            question = self._question("slow_node", finding, min(left, membership.size))
            self._suspect(_Case(membership.generation, finding, (name,), question))

    def slow_link(self, finding: Finding) -> None:
        """Take in that the links between nodes became slow."""
        membership = self._membership
        places = membership.places_of([0])
        if not places:
            return  # it has just left the world
        ((first, _),) = places
        here = membership.nodes[first].slots
        others = tuple(sorted(membership.nodes.keys() - {first}))
        on = (membership.size,) if here >= membership.size else (membership.size, here)
        self._suspect(_Case(membership.generation, finding, others, self._question("slow_link", finding, *on)))

    def uneven_stages(self, finding: Finding) -> None:
        """Take in how fast pipeline stages are, whose layers do not fit that."""
        membership, evidence = self._membership, finding.evidence
        question = self._question("uneven_stages", finding, membership.size)
        speeds = tuple(evidence["stage_s"])
        question = replace(question, stage_s=speeds, microbatches=evidence["microbatches"])
        self._suspect(_Case(membership.generation, finding, (), question), is_on=True)

    def look(self, now_s: float) -> None:
        """Do what is due, with a generation in force."""
        if self._watch.generation == self._membership.generation:
            self._measure(now_s)
        case = self._case
        if case is None:
            return
        if case.generation != self._membership.generation:
            self._drop()
        elif case.answer is not None:
            self._migrate_when_all_hold(case, case.answer, now_s)
        elif case.asked is not None:
            self._hear(case, case.asked, now_s)
        elif now_s >= self._not_before_s:
            self._ask(case, now_s)

    def _question(self, kind: Any, finding: Finding, *on: int) -> MigrationQuestion:
        evidence = finding.evidence
        times, step_s = evidence.get("step_factor", evidence["factor"]), self._watch.step_s
        return MigrationQuestion(
            kind, self._membership.plan, times, on, evidence["last_step"], step_s, self._migration_s
        )

    def _suspect(self, case: _Case, is_on: bool | None = None) -> None:
        if (self._is_on if is_on is None else is_on) and self._case is None and case.key not in self._in_vain:
            self._case = case

    def _ask(self, case: _Case, now_s: float) -> None:
        if case.question.step_s is None:  # a detector may see enough steps a moment before the metrics are read
            if self._watch.step_s is None:
                return
            case.question = replace(case.question, step_s=self._watch.step_s)
        membership = self._membership
        if case.question.kind == "slow_node" and case.question.on[0] >= membership.size:  # spare nodes: the plan stays
            self._agree(case, MigrationAnswer(True, membership.plan, membership.size), now_s)
            return
        try:
            case.asked = Child(PLANNER, str(self._run_dir))
        except OSError as problem:
            self._stay(case, MigrationAnswer(False, why=f"the planner cannot be started: {problem}"))
            return
        with suppress(ChannelClosed):  # it has died: `_hear` finds out
            case.asked.channel.send("question", question=asdict(case.question))

    def _hear(self, case: _Case, asked: Child, now_s: float) -> None:
        try:
            messages = asked.hear(0.0)
        except ChannelClosed:
            said = MigrationAnswer(False, why=f"the planner failed: {asked.reap()}")
        else:
            if not messages:
                return
            said = MigrationAnswer(**messages[0]["answer"])
            asked.kill()
        if said.pays:
            self._agree(case, said, now_s)
        else:
            self._stay(case, said)

    def _stay(self, case: _Case, said: MigrationAnswer) -> None:
        self._tell("stayed", case, said, why=said.why or "it would not pay")
        self._drop()

    def _agree(self, case: _Case, said: MigrationAnswer, now_s: float) -> None:
        case.answer, case.hold_until_s = said, now_s + HOLD_WITHIN_S
        self._hold(case.generation, self._leaves_too_few(case, said))

    def _leaves_too_few(self, case: _Case, said: MigrationAnswer) -> bool:
        """Return True if parts of the state may be nowhere on the nodes that stay."""
        membership, plan = self._membership, Plan.parse(self._membership.plan)
        slots = {name: membership.nodes[name].slots for name, _ in membership.places_of(range(membership.size))}
        alone = plan.shares_state * plan.pp * plan.ep == 1 and not plan.is_compressed
        if alone and all(each % plan.tp == 0 for each in slots.values()):
            return False  # each node has all of the state
        room = sorted((each for name, each in slots.items() if name not in case.leave_out), reverse=True)
        stay = next((n for n in range(len(room)) if sum(room[:n]) >= said.size), len(room))
        return len(slots) - stay > self._may_leave

    def _migrate_when_all_hold(self, case: _Case, said: MigrationAnswer, now_s: float) -> None:
        if self._watch.do_all_wait(self._membership.size):
            is_smaller = said.size < self._membership.size or case.question.kind == "slow_node"
            leave_out = case.leave_out if is_smaller else ()
            self._tell("migrated", case, said, left_out=list(leave_out), why=case.finding.why)
            self._in_vain.add(case.key)
            self._made = (case, self._membership.generation)
            self._not_before_s = now_s + APART_S
            self._case = None
            self._membership.migrate(said.plan, said.size, leave_out, f"the run migrates: {case.finding.why}")
        elif now_s > case.hold_until_s:
            if case.late_step is None:
                case.late_step = self._watch.step
            if self._watch.step <= case.late_step + 1:
                return
            self._tell("stayed", case, said, why=f"not all ranks held within {HOLD_WITHIN_S:.0f} s")
            self._drop()

    def _measure(self, now_s: float) -> None:
        """Measure what migrations cost, and what the last one has gained."""
        if self._awaits_step and self._watch.has_made_a_step:
            self._awaits_step, self._migration_s = False, now_s - self._joined_s
        if self._made is None or self._membership.generation == self._made[1]:
            return
        (case, _), after_s = self._made, self._watch.step_s
        if after_s is not None:
            before_s = case.question.step_s
            gained = before_s is not None and after_s <= (1 - GAINED) * before_s
            self._events.write("migration_measured", before_s=before_s, after_s=after_s, gained=gained)
            if gained:
                self._in_vain.discard(case.key)
            self._made = None

    def _drop(self) -> None:
        """Drop the case: it is decided, or its generation is over."""
        if self._case is not None and self._case.asked is not None:
            self._case.asked.kill()
        self._case = None

    def _tell(self, kind: str, case: _Case, said: MigrationAnswer, **facts: Any) -> None:
        asked = case.question
        self._events.write(
            kind,
            generation=case.generation,
            step=asked.step,
            because=asked.kind,
            plan=said.plan,
            size=said.size,
            step_s=asked.step_s,
            predicted_now_s=said.predicted_now_s,
            predicted_new_s=said.predicted_new_s,
            migration_s=round(asked.migration_s, 3),
            steps_left=said.steps_left,
            evidence=dict(case.finding.evidence),
            **facts,
        )
