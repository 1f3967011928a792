"""The outer steps of a run with sites, as its ranks see them: leave what changed, wait for the average, go on from it.

Between the ranks of a site and the other sites stands the site's exchange (`sync.exchange`); what passes between
it and the ranks are files in the site's folder. A round has its effect once its line is in the site's ledger.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from argosy.faults import fault
from argosy.files import atomic_write, make_folder
from argosy.processes.connection import BadMessage
from argosy.sync.layout import AdoptedState, LeftChange, RoundTraffic, RoundWait, read_record
from argosy.sync.ledger import dealt_in
from argosy.training.agreement import LONGEST_PAUSE_S, Agreement, WaitForOthers
from argosy.training.parts import Parts
from argosy.training.schedule import Pace, learning_rate
from argosy.training.site_files import SiteFiles
from argosy.training.step import Requests, StepOutcome


class Rounds(Agreement):
    """Sites agree in rounds: each makes steps of its own, then an outer step on the mean of what all have changed."""

    def __init__(self, parts: Parts, pace: Pace):
        super().__init__(parts, pace)
        state = parts.state
        assert state.outer is not None
        self._outer, self._sites, self._ledger = state.outer, state.outer.sites, state.outer.ledger
        self._checkpointer, self._batches = parts.checkpointer, parts.batches
        self._has_signal = parts.has_signal
        self._files = SiteFiles(state, state.outer, parts.world)
        self._line: dict[str, Any] | None = None

    @property
    def is_left_behind(self) -> bool:
        """True if the others made the round at hand without this site, or its state is to be taken from another.

        Only rank 0 looks; any rank may ask.
        """
        if not self._world.is_first:
            return False
        self._look()
        return self._outer.is_left_out(self._state.rounds) or self._sites.adoption.exists()

    @property
    def is_due(self) -> bool:
        """True after the last step of a round, and when its average is to be taken over."""
        number, step = self._state.rounds, self._state.step
        if number >= self._sites.rounds:
            return False
        return step == self._sites.end_of(number) or step >= self._sites.merge_after(number)

    def begin(self) -> bool:
        """Begin with the weights at hand, if the run is new; then go to where the sites are."""
        super().begin()
        if self.restorer.is_new:
            self._outer.begin(self._state.model.masters)
        self._batches.again()
        self._records.progress.doing("meeting the other sites")
        if not self._wait_for_ledger():
            return False
        if self._has_gone_apart() and self._adoptable() is None and not self._wait_for_state():
            return False
        return self.settle()

    def _has_gone_apart(self) -> bool:
        """Return True if the state at hand is older than the state that was taken over: no average leads on."""

        def look() -> bool:
            try:
                return self._state.step < int(self._sites.adopted_at.read_text())
            except (OSError, ValueError):
                return False

        return self._world.share_first(look, bool)

    def settle(self) -> bool:
        """Make all outer steps that are due, until this site has a round to train in.

        Returns False if a signal came before that: what is due is made when the run goes on. While sites sum gradients
        there is nothing to be made after a step (`sum_gradients`), but for steps that the others made without this one.
        """
        state, sites = self._state, self._sites
        began, before = time.monotonic(), state.rounds
        self._say_reached()
        while state.rounds < sites.rounds:
            if self._adopt():
                continue
            number = state.rounds
            is_decided = self._is_decided(number)
            if self._outer.is_left_out(number) if is_decided else not self._is_member(number):
                pass  # it goes on with the others' average
            elif state.step < sites.end_of(number):
                break
            else:
                if not is_decided:
                    self._files.leave_change(number, self._about(number))
                if state.step < sites.merge_after(number) and self._is_member(number + 1):
                    break
            if not is_decided:
                if not self._wait(number):
                    return False
            elif self._world.share_first(self._sites.average(number).exists, bool):
                self._apply(number)
                self._say_reached()
                self._files.leave_state(number)
            elif not self._wait_for_state():
                return False
        if state.rounds > before:
            self._line = self._measured(state.rounds - 1, before, time.monotonic() - began)
        return True

    def steps(self) -> Iterator[int]:
        """Yield as `Agreement.steps`; a run that went back may be where an outer step was due and not made yet, or, as
        the state that it took over could not be saved, before that.
        """
        last = 0
        for step in super().steps():
            is_apart, last = step < last and self._has_gone_apart(), step
            if is_apart and not self._wait_for_state():
                return
            is_due = step >= self._sites.merge_after(self._state.rounds)
            if (is_apart or is_due) and not self.settle():
                return
            if self._state.step == step:
                yield step

    def requests(self) -> Requests:
        return replace(super().requests(), left_behind=self.is_left_behind)

    def sum_gradients(self, outcome: StepOutcome) -> StepOutcome | None:
        """Replace the step's gradient by the mean over the sites, weighted by tokens, if it is summed (sync.from_step).

        Returns the outcome with the norm of the sum. None: the step has to be done again, after `settle`; or a signal
        came.
        """
        number, began = self._state.rounds, time.monotonic()
        if not self._sites.sums_gradients(number):
            return outcome
        self._say_reached()
        while not self._is_decided(number):
            self._files.leave_gradient(number, self._about(number))
            if not self._wait(number) or self._adoptable() is not None:
                return None
        if not self._world.share_first(self._sites.average(number).exists, bool):
            self._wait_for_state()
            return None
        norm = self._take_gradient(number)
        self._line = self._measured(number, number, time.monotonic() - began)
        return replace(outcome, gradient_norm=norm)

    def after_drop(self) -> bool:
        return self.settle()

    def after_step(self, outcome: StepOutcome) -> bool:
        """Make the outer steps that are due, unless the run is asked to stop."""
        return outcome.requests.stop or not (self.is_due or outcome.requests.left_behind) or self.settle()

    def line(self) -> Mapping[str, Any]:
        line, self._line = self._line, None
        return {} if line is None else {"sites": line}

    # ---- a round ------------------------------------------------------------------------------------------------

    def _is_decided(self, number: int) -> bool:
        """Return True once the round is in the ledger, the same on all ranks."""
        if self._world.is_first:
            self._look()
        if not self._world.any(self._world.is_first and len(self._ledger.lines) > number):
            return False
        self._follow(number)
        return True

    def _look(self) -> None:
        """Read the ledger, on rank 0; have the exchange mend one that is damaged."""
        self._ledger.refresh()
        if self._ledger.damage and not self._sites.damaged.exists():
            self._sites.folder.mkdir(parents=True, exist_ok=True)
            self._sites.damaged.touch()

    def _wait_for_ledger(self) -> bool:
        """Wait until no line of the ledger is damaged, on any rank. Return False if a signal came first.

        Rounds that it seems not to have would be made again, with other samples.
        """

        def is_whole() -> bool:
            self._look() if self._world.is_first else self._ledger.refresh()
            return not self._world.any(bool(self._ledger.damage))

        return self._wait_until(is_whole, lambda: self._ledger.damage)

    def _wait_until(
        self, is_over: Callable[[], bool], words: Callable[[], str], meanwhile: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait on all ranks together. Return False if a signal came first. words: say what is waited for, on rank 0.

        Raises: WorldIsOver.
        """
        waiting = WaitForOthers(self._records.progress)
        while not is_over():
            if self._has_signal():
                return False
            self._parts.advance()
            meanwhile()
            if self._world.is_first:
                waiting.is_for(words())
            waiting.pause()
        waiting.ends()
        return True

    def _say_reached(self) -> None:
        """Tell the exchange how many rounds this site has made."""
        if self._world.is_first:
            make_folder(self._sites.folder)
            with atomic_write(self._sites.reached) as file:
                file.write(str(self._state.rounds).encode())

    def _follow(self, number: int) -> None:
        """Read the ledger up to that round, which is there: rank 0 has read it."""
        while len(self._ledger.lines) <= number:
            self._ledger.refresh()
            if len(self._ledger.lines) <= number:
                time.sleep(LONGEST_PAUSE_S)

    def _is_member(self, number: int) -> bool:
        return self._sites.me in dealt_in(self._sites.shares, self._ledger.lines, number)

    def _about(self, number: int) -> LeftChange:
        run, sites = self._sites.run, self._sites
        start, stop = sites.shares.start(number), sites.end_of(number)
        first, end = start * run.train.global_batch, stop * run.train.global_batch
        is_gradient = sites.sums_gradients(number)
        # An average a step is a lot to keep: for what an older checkpoint would need there are the other sites.
        last = 1 if is_gradient else run.checkpoint.keep_last
        oldest = min(sorted(self._checkpointer.committed)[-last:], default=0)
        return LeftChange(
            tokens=int(self.step.counted) if is_gradient else (stop - start) * run.tokens_per_step,
            skipped=self._batches.skipped_numbers(first, end),
            needs_round=sites.rounds_at(max(0, oldest - 1)),  # it may have ended a round whose average was to come
        )

    def _wait(self, number: int) -> bool:
        """Wait until the round is in the ledger. Return False if a signal came first."""

        def leave_state() -> None:
            if number:
                self._files.leave_state(number - 1)  # another site may need it before it can take part

        def is_over() -> bool:
            return self._is_decided(number) or self._adoptable() is not None

        return self._wait_until(is_over, self._waits_for, leave_state)

    # ---- the whole state of another site ------------------------------------------------------------------------

    def _adoptable(self) -> AdoptedState | None:
        """Return what is known of another site's state that this one is to go on from; None if there is none."""

        def look() -> AdoptedState | None:
            try:
                about = read_record(self._sites.adoption, AdoptedState)
            except (OSError, BadMessage):
                return None
            self._ledger.refresh()
            there = self._ledger.lines[about.rounds - 1 : about.rounds]
            is_whole = bool(there) and there[0].chain == about.chain
            return about if is_whole and about.chain != self._outer.adopted_chain else None

        return self._world.share_first(look, AdoptedState | None)

    def _adopt(self) -> bool:
        """Take another site's state over, if one was fetched. Returns True if that was done."""
        about = self._adoptable()
        if about is None:
            return False
        state, left = self._state, self._state.step
        self._ledger.refresh()
        self._follow(about.rounds - 1)
        state.in_update = True
        self._files.adopt(about.rounds - 1)
        state.rounds, state.step = about.rounds, self._sites.end_of(about.rounds - 1)
        self._uncount(left)
        state.pending = state.is_prepared = state.in_update = False
        state.last_update, state.history = None, state.history.turned_back(state.step)
        done = state.step * self._sites.run.train.global_batch
        state.skipped = tuple(some for some in state.skipped if some[0] < done)  # others may be dealt in later steps
        self._outer.adopted_chain = about.chain
        state.model.after_update()
        self._batches.follow()
        self._batches.again()
        self._say_reached()
        self._records.tell("state_taken", step=left, to_step=state.step, round=about.rounds - 1)
        self._records.progress.say(
            f" the other sites went on without this one, which was at step {left}; it goes on at step {state.step} "
            "from their weights",
            "yellow",
        )
        self._checkpointer.forget_from(state.step)
        self._memory.begin()
        if self._world.is_first:
            self._records.metrics.forget_from(state.step)
            with atomic_write(self._sites.adopted_at) as file:
                file.write(str(state.step).encode())
        self._checkpointer.save(state, background=False)
        if self._world.is_first:
            for change in self._sites.folder.glob("change-*.json"):
                change.unlink()  # it is of weights that this site has left: the round is trained anew
            self._sites.adoption.unlink(missing_ok=True)
        self._world.barrier()
        return True

    def _wait_for_state(self) -> bool:
        """Wait for another site's state: an average is lost. Return False if a signal came first."""
        if self._world.is_first:
            self._sites.lost.touch()
        return self._wait_until(lambda: self._adoptable() is not None, lambda: "no state of another site yet")

    def _waits_for(self) -> str:
        if self._ledger.damage:
            return self._ledger.damage
        try:
            wait = read_record(self._sites.status, RoundWait)
            names, is_short = wait.waiting_for, wait.quorum_missing
        except (OSError, BadMessage):
            names, is_short = [], False
        if not names:
            return f"the sum of round {self._state.rounds} is on its way"
        needs = f"; a round needs {self._sites.quorum} sites" if is_short else ""
        return f"{', '.join(names)} {'are' if names[1:] else 'is'} not ready for round {self._state.rounds}{needs}"

    def _apply(self, number: int) -> None:
        """Make the outer step of a round in the ledger."""
        state, line = self._state, self._ledger.lines[number]
        left = state.step
        fault("outer", step=state.step, rank=self._world.rank)
        if self._sites.sums_gradients(number):
            self._follow_step(number)
        else:
            state.apply_outer(number)
            state.model.after_update()
        if line.dealt is not None or state.step < left:
            self._batches.again()
        if state.step < left:
            self._uncount(left)
            self._checkpointer.forget_from(state.step + 1)
            self._memory.begin()
            if self._world.is_first:
                self._records.metrics.forget_from(state.step)
        if self._sites.sums_gradients(number) and self._outer.is_left_out(number + 1):
            return  # said once, of the last such step
        if state.step > left or self._sites.me not in line.tokens:
            self._records.tell("left_out", round=number, step=left, to_step=state.step)
            self._records.progress.say(
                f" round {number} was made without this site, which had come to step {left}; it goes on at step "
                f"{state.step} from the others' weights",
                "yellow",
            )

    def _uncount(self, left: int) -> None:
        """Count the tokens no more of the steps up to `left` that the site has gone back from."""
        self._state.tokens -= sum(self._sites.run.tokens_at(step) for step in range(self._state.step, left))

    def _take_gradient(self, number: int) -> float:
        """Make the sum of a round's gradients the gradient of the step at hand. Returns its norm.

        No rank applies the step before all ranks have met here, so `TrainState.pending` holds of the sum.
        """
        state = self._state
        state.pending = False
        for piece, mean in self._outer.mean_of(number, state.model.pieces):
            piece.value.grad = mean.to(piece.value.dtype)
        state.pending = True
        squares = self._world.sum(state.model.square_share().double().view(1))
        return float(f"{squares.item() ** 0.5:.7g}")  # sites with unlike plans sum squares in unlike orders

    def _follow_step(self, number: int) -> None:
        """Make a step that the other sites made without this one, from their gradient."""
        state, run = self._state, self._sites.run
        state.drop_gradient()
        norm = self._take_gradient(number)
        unknown = StepOutcome(math.nan, norm, replicas_differ=False, requests=Requests(), loads=None)
        self.step.apply(self.step.update(unknown, learning_rate(run, state.step, run.train.steps)))

    def _measured(self, number: int, before: int, seconds: float) -> dict[str, Any]:
        """Return what the step's line of metrics says of the outer steps from round `before` to `number`."""
        line, sites = self._ledger.lines[number], self._sites
        traffic: dict[str, int] = {}
        with suppress(OSError, BadMessage):
            traffic = read_record(sites.traffic(number), RoundTraffic).model_dump()
        wire, elements = sites.wire_of(number), sites.flat(number).elements
        whole, sent = 4 * elements, wire.blocks(elements) * wire.block_bytes
        since = sites.shares.start(max(0, before + 1 - sites.rounds_of_change(number)))
        is_of_fragment = len(sites.flats) > 1 and not sites.sums_gradients(number)
        turn = {"fragment": sites.flats.index(sites.turn(number))} if is_of_fragment else {}
        return {
            "round": number,
            **turn,
            "participants": list(line.tokens),
            "seconds": round(seconds, 6),
            **traffic,
            "ratio": round(whole / sent, 3),
            "steps": sites.end_of(number) - sites.shares.start(before),
            "staleness_steps": sites.end_of(number) - since,
            **({} if sites.sums_gradients(number) else {"distance": self._distance(number)} | dict(line.extra)),
        }

    def _distance(self, number: int) -> float:
        """Return how far sites had come apart in a round: mean over sites of |w_i - mean w| / |w|, w agreed on."""
        shapes, mine = self._sites.flat(number).shapes, self._files.boxes()
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for name in shapes.keys() & mine.keys():
            squares += self._outer.state_of(name)["weights"].double().square().sum()
        norm = self._world.sum(squares).item() ** 0.5
        spread = self._ledger.lines[number].extra.get("spread", {}).values()
        return float(f"{sum(spread) / len(spread) / norm:.6g}") if spread and norm else 0.0
