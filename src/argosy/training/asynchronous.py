"""A worker of asynchronous training: the loop in which it computes gradients for the parameter servers.

Weights come from the servers, which also make the updates; its own are, with local steps, moments alone. So it saves
nothing, and a worker that is started again just asks for samples. All ranks of its world call each method together; the
first one speaks to the servers, and passes weights and gradients to the others through files in the worker's folder.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from argosy.config.schema import RunConfig
from argosy.faults import fault
from argosy.observe.counters import Communication
from argosy.observe.heartbeat import Heartbeat
from argosy.parallel.gradients import clip
from argosy.parallel.pieces import Held
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.processes.secret import secret_of
from argosy.sync.server.client import Client, Task
from argosy.sync.server.layout import Layout
from argosy.sync.sites.layout import FOLDER, group_folder
from argosy.sync.sites.wire import F32
from argosy.training.parts import Parts
from argosy.training.schedule import learning_rate
from argosy.training.state import Survivor, Update, boxes_written
from argosy.training.step import Requests, Step, StepOutcome
from argosy.training.stop import HOLD_S, StopSignal
from argosy.training.waiting import Waiting

FIRST_LOOK_S, LOOK_S = 0.001, 0.05
"""How often ranks look whether the servers have answered: at first, and after a while."""
T = TypeVar("T")


class Interrupted(Exception):
    """A signal came to any rank. All raise it alike."""


@dataclass(frozen=True)
class Made:
    """A step that was made for a task."""

    update: Update
    seconds: Mapping[str, float]
    """Where its time went, as the clock gives it."""
    communication: Communication


def train_asynchronously(
    run: RunConfig,
    plan: Plan,
    world: World,
    run_dir: Path,
    stop: StopSignal,
    survivor: Survivor,
    heartbeat: Heartbeat,
) -> bool:
    """Compute gradients for the run's parameter servers until the run is over. Returns True once it is.

    As `training.loop.train`, for a plan with sync=async. Raises: UserError if the servers refuse this worker.
    """
    worker = Worker(run, plan, world, run_dir, stop, survivor, heartbeat)
    with worker:
        try:
            while (task := worker.next_task()).kind != "over":
                if task.kind == "judge":
                    worker.score(task)
                else:
                    worker.work(task)
        except Interrupted:
            return worker.finish(is_over=False)
        return worker.finish(is_over=True)


class Worker:
    """One rank's part of a worker."""

    def __init__(
        self,
        run: RunConfig,
        plan: Plan,
        world: World,
        run_dir: Path,
        stop: StopSignal,
        survivor: Survivor,
        heartbeat: Heartbeat,
    ):
        self._began_s = time.monotonic()
        run = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"sample_prompt": None})})
        parts = Parts.make(run, plan, world, run_dir, stop, survivor, heartbeat)
        self._run, self._world, self._stop, self._parts = run, world, stop, parts
        self._heartbeat, self._records, self._data = heartbeat, parts.records, parts.data
        self._model, self._state, self._batches = parts.state.model, parts.state, parts.batches
        self._evaluator, self._meter, self._clock = parts.evaluator, parts.meter, parts.clock
        self._layout = layout = Layout(run)
        self._step = Step(run, self._state, world, self._clock, check_world=stop.check)
        self._mine = boxes_written(self._model.masters, world)
        self._weights, self._gradients = self._files(run_dir / FOLDER)
        self._client: Client | None = None
        if world.is_first:
            self._client = Client(layout, secret_of(group_folder(run_dir)), self._weights)
        self._last_step = self._scored = -1
        self._time_to_first_step_s: float | None = None

    def __enter__(self) -> Worker:
        self._meter.open()
        self._records.measure_peak()
        self._records.introduce()
        self._records.started(0)
        self._clock.lap()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._meter.close()
        if self._client is not None:
            self._client.close()
        self._batches.close()

    def next_task(self) -> Task:
        """Wait for something to do, and take the weights for it over. Raises: Interrupted."""
        self._stop.between_steps()
        if self._stop.is_to_hold:
            self._heartbeat.enter("waiting")
            self._stop.hold(HOLD_S)
        with self._clock.time("communication"):
            task = Task(**self._answer(lambda client: client.next_task()))
            if task.kind != "over":
                with torch.no_grad():
                    for piece, part in self._own_parts(self._weights):
                        piece.value.copy_(torch.from_numpy(np.array(part)))
                self._model.after_update()
                self._world.barrier()  # the first rank receives the next weights into the same files
        step = self._layout.step_of(task.version)
        if self._last_step >= step and self._world.is_first:
            self._records.metrics.forget_from(step)  # the servers have gone back
        self._state.step = step
        return task

    def work(self, task: Task) -> None:
        """Make the steps of a task, and deliver the gradient; if there are several, what they have changed."""
        made: list[Made] = []
        steps = self._layout.local_steps
        for number in range(steps):
            self._heartbeat.begin(self._state.step)
            outcome = self._gradient(task, task.item * steps + number)
            if outcome is None:
                return
            is_last = number == steps - 1
            made.append(self._made(outcome) if steps == 1 else self._local_step(outcome, is_last))
            if is_last:
                self._deliver(task, made)
            if outcome.requests.stop:
                raise Interrupted
            self._stop.between_steps()

    def score(self, task: Task) -> None:
        """Score the weights on held-out text."""
        with self._clock.time("evaluate"):
            self._evaluator.evaluate(self._stop.check)
        self._records.progress.doing("")
        score, self._scored = self._evaluator.score, self._layout.step_of(task.version)
        if score is not None:
            self._records.evaluated(self._scored - 1, score)
        if self._client is not None:
            loss, bits_per_byte = (score.loss, score.bits_per_byte) if score else (None, None)
            self._client.report_score(task.version, loss, bits_per_byte)

    def finish(self, is_over: bool) -> bool:
        """Write the report. Returns `is_over`."""
        self._heartbeat.enter("finishing")
        if self._scored != self._run.train.steps:
            self._evaluator.score = None  # another worker has scored the last weights
        if self._world.is_first and is_over and self._last_step >= 0:
            self._records.report(self._data, self._evaluator, True, self._time_to_first_step_s)
        self._records.events.write("end", step=self._state.step, finished=is_over)
        return is_over

    # ---- what a step consists of --------------------------------------------------------------------------------

    def _gradient(self, task: Task, step: int) -> StepOutcome | None:
        """Leave the gradient of the samples of `step` in the pieces; None: the task is given up."""
        while True:
            fault("batch", step=self._state.step, rank=self._world.rank)
            with self._clock.time("data"):
                batch = self._batches.read(step, self._parts.advance)
            outcome = self._step.exchange(self._step.forward_backward(batch), self._requests)
            if not outcome.requests.quarantine:
                break
            self._state.drop_gradient()
            self._batches.quarantine()
        if outcome.replicas_differ:  # all take the weights anew, and another gets the samples if this one is too slow
            self._records.tell("replicas_differ", step=self._state.step)
            self._state.drop_gradient()
            self._forget_moments()
            return None
        if math.isfinite(outcome.loss) and math.isfinite(outcome.gradient_norm):
            return outcome
        why = f"loss {outcome.loss}, gradient norm {outcome.gradient_norm}"
        self._records.tell("bad_gradient", step=self._state.step, samples=self._layout.samples(task.item), why=why)
        self._state.drop_gradient()
        with self._clock.time("communication"):
            self._answer(lambda client: client.report_bad(task, why))
        if outcome.requests.stop:
            raise Interrupted
        return None

    def _made(self, outcome: StepOutcome) -> Made:
        return Made(self._step.update(outcome, 0.0), {}, {})

    def _local_step(self, outcome: StepOutcome, is_last: bool) -> Made:
        """Apply the gradient with this worker's own optimizer, whose moments are its own from one task to the next."""
        rate = learning_rate(self._run, self._state.step, self._run.train.steps)
        update = self._step.update(outcome, rate)
        self._step.apply(update)
        seconds = {} if is_last else self._clock.lap()  # the push belongs to the last one
        return Made(update, seconds, self._clock.communication)

    def _forget_moments(self) -> None:
        optimizer = self._state.optimizer
        for piece in self._model.masters if self._layout.local_steps > 1 else ():
            state = optimizer.state_of(piece)
            optimizer.load_state(piece, {key: torch.zeros_like(tensor) for key, tensor in state.items()})

    def _leave_gradient(self, norm: float) -> None:
        """Write this rank's part of the gradient, clipped by its norm, to the file that the first rank pushes from."""
        clip(self._model.pieces, self._run.optimizer.grad_clip, norm)
        self._model.before_update()
        for piece, part in self._own_parts(self._gradients, self._mine):
            assert piece.value.grad is not None
            part[...] = piece.value.grad.float().cpu().numpy()
        self._state.drop_gradient()
        for piece in self._model.masters:
            piece.value.grad = None

    def _leave_change(self) -> None:
        """Write this rank's part of what local steps have changed, weights before minus weights now, to that file."""
        for (piece, part), (_, before) in zip(
            self._own_parts(self._gradients, self._mine), self._own_parts(self._weights, self._mine), strict=True
        ):
            began = torch.from_numpy(np.array(before)).to(piece.value.dtype).float()  # as the piece could hold them
            part[...] = (began - piece.value.detach().float().cpu()).numpy()

    def _own_parts(self, vectors: list[F32], names: Collection[str] | None = None) -> Iterator[tuple[Held, F32]]:
        """Yield this rank's pieces, those of `names` or all, with their part of the servers' vectors."""
        for number, flat in enumerate(self._layout.flats):
            for piece in self._model.masters:
                if piece.name in flat.shapes and piece.value.numel() and (names is None or piece.name in names):
                    yield piece, flat.part(vectors[number], *piece.place)

    def _deliver(self, task: Task, made: list[Made]) -> None:
        """Push what the steps of a task have come to, and write the lines of the update that it became."""
        with self._clock.time("optimizer"):
            if self._layout.local_steps > 1:
                self._leave_change()
            else:
                self._leave_gradient(made[0].update.gradient_norm)
        fault("change", step=self._layout.step_of(task.version), rank=self._world.rank)
        losses, norms = [one.update.loss for one in made], [one.update.gradient_norm for one in made]
        with self._clock.time("communication"):
            self._world.barrier()
            began_s = time.monotonic()
            before = self._traffic()
            done = self._answer(lambda client: client.deliver(task, self._gradients, losses, norms))
        made[-1] = replace(made[-1], seconds=self._clock.lap(), communication=self._clock.communication)
        if done["update"] is None:
            self._records.tell("gradient_unwanted", step=self._state.step, samples=self._layout.samples(task.item))
            return
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began_s
        self._last_step = self._layout.step_of(done["update"] + 1) - 1
        if self._world.is_first:
            sent, received = (now - then for now, then in zip(self._traffic(), before, strict=True))
            sites = self._push(done["staleness"], time.monotonic() - began_s, sent, received)
            self._write_lines(task, made, done, sites)

    def _push(self, staleness: int, waited_s: float, sent: int, received: int) -> dict[str, Any]:
        """Return what the last line of an update says of its push."""
        elements = sum(flat.elements for flat in self._layout.flats)
        return {
            "site": self._run.site,
            "staleness_steps": staleness,
            "steps": self._layout.local_steps,
            "seconds": round(waited_s, 6),
            "sent_bytes": sent,
            "received_bytes": received,
            "ratio": round(4 * elements / sent, 3) if sent else 0.0,
        }

    def _write_lines(self, task: Task, made: list[Made], done: dict[str, Any], sites: dict[str, Any]) -> None:
        batch, steps = self._run.train.global_batch, self._layout.local_steps
        for number, one in enumerate(made):
            step = self._layout.step_of(done["update"]) + number
            rate = one.update.learning_rate if steps > 1 else done["rate"]
            first = task.item * self._layout.item_samples + number * batch
            record = self._records.step(
                replace(one.update, step=step, learning_rate=rate),
                (step + 1) * self._run.tokens_per_step,
                {"sample_ranges": [[first, first + batch]]},
                one.seconds,
                one.communication,
                more={"sites": sites} if number == steps - 1 else {},
            )
        score = self._evaluator.score
        self._records.progress.step(record, self._run.train.steps, score.loss if score else None, None)

    def _traffic(self) -> tuple[int, int]:
        return (0, 0) if self._client is None else (self._client.sent_bytes, self._client.received_bytes)

    def _requests(self) -> Requests:
        return Requests(stop=self._stop.is_requested(), quarantine=self._batches.are_unreadable)

    # ---- between ranks and servers ------------------------------------------------------------------------------

    def _answer(self, ask: Callable[[Client], Future[Any]]) -> dict[str, Any]:
        """Return to all ranks what the servers answer to the first one. Raises: Interrupted, WorldIsOver."""
        future = ask(self._client) if self._client is not None else None
        look_s, waiting = FIRST_LOOK_S, Waiting(self._records.progress)
        while True:
            self._parts.advance()
            is_there = 1.0 if future is not None and future.done() else 0.0
            has_signal = float(self._stop.number is not None)
            seen = torch.tensor([is_there, has_signal], device=self._world.device)
            there, signals = self._world.sum(seen).tolist()
            if there:
                break
            if signals:
                raise Interrupted
            if self._client is not None:
                waiting.is_for(self._client.waits_for)
            time.sleep(look_s)
            look_s = min(1.5 * look_s, LOOK_S)
        waiting.ends()

        def found() -> Any:
            assert future is not None
            answer = future.result()
            return asdict(answer) if isinstance(answer, Task) else answer.model_dump()

        return self._world.share_first(found, dict[str, Any])

    def _files(self, folder: Path) -> tuple[list[F32], list[F32]]:
        """Map the files through which ranks share weights and gradients: for each, a vector by server."""
        paths = [folder / "weights.f32", folder / "gradient.f32"]
        sizes = [flat.elements for flat in self._layout.flats]
        if self._world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                with path.open("ab") as file:
                    file.truncate(4 * sum(sizes))
        self._world.barrier()
        mapped = [np.memmap(path, np.float32, "r+", shape=(sum(sizes),)) for path in paths]
        ends = list(itertools.accumulate(sizes))
        weights, gradients = (
            [vector[end - size : end] for size, end in zip(sizes, ends, strict=True)] for vector in mapped
        )
        return weights, gradients
