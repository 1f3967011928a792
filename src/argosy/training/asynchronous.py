"""A worker of asynchronous training: the loop in which it computes gradients for the parameter servers.

It has no state of its own that could be lost: weights come from the servers, which also make the updates. So it saves
nothing, and a worker that is started again just asks for samples. All ranks of its world call each method together; the
first one speaks to the servers, and passes weights and gradients to the others through files in the worker's folder.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.faults import fault
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CommunicationMeter
from argosy.observe.heartbeat import Heartbeat
from argosy.parallel.apply import apply
from argosy.parallel.gradients import clip
from argosy.parallel.world import World, node_of_each_rank
from argosy.plan.plan import Plan
from argosy.processes.secret import secret_of
from argosy.sync.server.client import Client, Task
from argosy.sync.server.layout import F32, Layout
from argosy.sync.sites.layout import group_folder
from argosy.training.batches import Batches
from argosy.training.evaluation import Evaluator
from argosy.training.own_checks import check_own_code
from argosy.training.records import Records
from argosy.training.state import Survivor, TrainState, boxes_written
from argosy.training.step import Requests, Step, StepOutcome
from argosy.training.stop import StopSignal

FOLDER = "exchange"
FIRST_LOOK_S, LOOK_S = 0.001, 0.05
"""How often ranks look whether the servers have answered: at first, and after a while."""
HOLD_S = 20.0
"""How long a rank waits for its world to end; then it goes on, as nothing has ended it."""
T = TypeVar("T")


class Interrupted(Exception):
    """A signal came to any rank. All raise it alike."""


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
                    worker.step(task)
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
        memory_before_bytes = survivor.enter(world, run)
        run = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"sample_prompt": None})})
        self._run, self._plan, self._world, self._stop = run, plan, world, stop
        self._survivor, self._heartbeat = survivor, heartbeat
        self._records = Records(run, plan, world, run_dir)
        self._records.memory_before_bytes = memory_before_bytes
        check_own_code(run, plan)
        self._layout = layout = Layout(run)
        self._model = apply(plan, run, world)
        self._data = open_data(run.data, run.seed, run.train.batches)
        self._state = TrainState.begin(self._model, plan, run)
        self._batches = Batches(run, plan, self._data, self._state, world, self._records.events)
        self._evaluator = Evaluator(run, plan, self._data.sources, self._model, world)
        nodes = node_of_each_rank(world)
        self._meter = CommunicationMeter(self._model.meshes.axis_of_groups(), nodes.__getitem__, world.device)
        self._clock = StepClock(world.device, heartbeat, self._meter)
        self._step = Step(run, self._state, world, self._clock, check_world=stop.check)
        self._mine = boxes_written(self._model.masters, world)
        self._weights, self._gradients = self._files(run_dir / FOLDER)
        self._client: Client | None = None
        if world.is_first:
            self._client = Client(layout, secret_of(group_folder(run_dir)), self._weights)
        self._last_update = self._scored = -1
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
                for number, flat in enumerate(self._layout.flats):
                    for piece in self._model.masters:
                        if piece.name in flat.shapes and piece.value.numel():
                            part = flat.part(
                                self._weights[number], piece.name, tuple(piece.offset), tuple(piece.value.shape)
                            )
                            with torch.no_grad():
                                piece.value.copy_(torch.from_numpy(np.array(part)))
                self._model.after_update()
                self._world.barrier()  # the first rank receives the next weights into the same files
        if self._last_update >= task.version and self._world.is_first:
            self._records.metrics.forget_from(task.version)  # the servers have gone back
        self._state.step = task.version
        return task

    def step(self, task: Task) -> None:
        """Compute the gradient of a task's samples, and deliver it."""
        self._heartbeat.begin(task.version)
        while True:
            fault("batch", step=task.version, rank=self._world.rank)
            with self._clock.time("data"):
                batch = self._batches.read(task.item, self._while_waiting)
            outcome = self._step.exchange(self._step.forward_backward(batch), self._requests)
            if not outcome.requests.quarantine:
                break
            self._state.drop_gradient()
            self._batches.quarantine()
        if outcome.replicas_differ:  # all take the weights anew, and another gets the samples if this one is too slow
            self._records.tell("replicas_differ", step=task.version)
            self._state.drop_gradient()
            return
        if math.isfinite(outcome.loss) and math.isfinite(outcome.gradient_norm):
            self._deliver(task, outcome)
        else:
            why = f"loss {outcome.loss}, gradient norm {outcome.gradient_norm}"
            self._records.tell("bad_gradient", step=task.version, samples=self._samples(task), why=why)
            self._state.drop_gradient()
            with self._clock.time("communication"):
                self._answer(lambda client: client.report_bad(task, why))
        if outcome.requests.stop:
            raise Interrupted

    def score(self, task: Task) -> None:
        """Score the weights on held-out text."""
        batches = itertools.count(1)

        def before_batch() -> None:
            self._while_waiting()
            self._records.progress.doing(f"evaluating, batch {next(batches)} of {self._evaluator.batches}")

        with self._clock.time("evaluate"):
            self._evaluator.evaluate(before_batch)
        self._records.progress.doing("")
        score, self._scored = self._evaluator.score, task.version
        if score is not None:
            self._records.evaluated(task.version - 1, score)
        if self._client is not None:
            self._client.scored(task.version, score.loss if score else None, score.bits_per_byte if score else None)

    def finish(self, is_over: bool) -> bool:
        """Write the report. Returns `is_over`."""
        self._heartbeat.enter("finishing")
        if self._scored != self._run.train.steps:
            self._evaluator.score = None  # another worker has scored the last weights
        if self._world.is_first and is_over and self._last_update >= 0:
            memory = self._survivor.memory_before_bytes
            self._records.report(self._data, self._evaluator, True, self._time_to_first_step_s, memory)
        self._records.events.write("end", step=self._state.step, finished=is_over)
        return is_over

    # ---- what a step consists of --------------------------------------------------------------------------------

    def _deliver(self, task: Task, outcome: StepOutcome) -> None:
        """Push the step's gradient, clipped by its norm, and write the line of the update that it became."""
        with self._clock.time("optimizer"):
            clip(self._model.pieces, self._run.optimizer.grad_clip, outcome.gradient_norm)
            self._model.before_update()
            for number, flat in enumerate(self._layout.flats):
                for piece in self._model.masters:
                    if piece.name in self._mine and piece.name in flat.shapes:
                        assert piece.value.grad is not None
                        where = (piece.name, tuple(piece.offset), tuple(piece.value.shape))
                        flat.part(self._gradients[number], *where)[...] = piece.value.grad.float().cpu().numpy()
            self._state.drop_gradient()
            for piece in self._model.masters:
                piece.value.grad = None
        fault("change", step=task.version, rank=self._world.rank)
        with self._clock.time("communication"):
            self._world.barrier()
            began_s = time.monotonic()
            before = self._traffic()
            done = self._answer(
                lambda client: client.deliver(task, self._gradients, outcome.loss, outcome.gradient_norm)
            )
        seconds = self._clock.lap()
        if done["update"] is None:
            self._records.tell("gradient_unwanted", step=task.version, samples=self._samples(task))
            return
        if self._time_to_first_step_s is None:
            self._time_to_first_step_s = time.monotonic() - self._began_s
        self._last_update = done["update"]
        if self._world.is_first:
            sent, received = (now - then for now, then in zip(self._traffic(), before, strict=True))
            self._write_line(task, outcome, done, seconds, time.monotonic() - began_s, sent, received)

    def _write_line(
        self,
        task: Task,
        outcome: StepOutcome,
        done: dict[str, Any],
        seconds: dict[str, float],
        waited_s: float,
        sent: int,
        received: int,
    ) -> None:
        update = replace(self._step.update(outcome, done["rate"]), step=done["update"])
        elements = sum(flat.elements for flat in self._layout.flats)
        record = self._records.step(
            update,
            (update.step + 1) * self._run.tokens_per_step,
            {"sample_ranges": self._samples(task)},
            seconds,
            self._clock.communication,
            sites={
                "site": self._run.site,
                "staleness_steps": done["staleness"],
                "steps": 1,
                "seconds": round(waited_s, 6),
                "sent_bytes": sent,
                "received_bytes": received,
                "ratio": round(4 * elements / sent, 3) if sent else 0.0,
            },
        )
        score = self._evaluator.score
        self._records.progress.step(record, self._run.train.steps, score.loss if score else None, None)

    def _samples(self, task: Task) -> list[list[int]]:
        batch = self._run.train.global_batch
        return [[task.item * batch, (task.item + 1) * batch]]

    def _traffic(self) -> tuple[int, int]:
        return (0, 0) if self._client is None else (self._client.sent_bytes, self._client.received_bytes)

    def _requests(self) -> Requests:
        return Requests(stop=self._stop.is_requested(), quarantine=self._batches.are_unreadable)

    # ---- between ranks and servers ------------------------------------------------------------------------------

    def _answer(self, ask: Callable[[Client], Future[Any]]) -> dict[str, Any]:
        """Return to all ranks what the servers answer to the first one. Raises: Interrupted, WorldIsOver."""
        future = ask(self._client) if self._client is not None else None
        look_s, shown, began_s = FIRST_LOOK_S, "", time.monotonic()
        while True:
            self._while_waiting()
            is_there = 1.0 if future is not None and future.done() else 0.0
            has_signal = float(self._stop.number is not None)
            seen = torch.tensor([is_there, has_signal], device=self._world.device)
            there, signals = self._world.sum(seen).tolist()
            if there:
                break
            if signals:
                raise Interrupted
            if self._client is not None and time.monotonic() - began_s > 1.0 and self._client.waits_for != shown:
                shown = self._client.waits_for
                self._records.progress.doing(shown)
            time.sleep(look_s)
            look_s = min(1.5 * look_s, LOOK_S)
        if shown:
            self._records.progress.doing("")

        def found() -> Any:
            assert future is not None
            answer = future.result()
            return asdict(answer) if isinstance(answer, Task) else answer.model_dump()

        return self._world.share_first(found, dict[str, Any])

    def _while_waiting(self) -> None:
        self._heartbeat.advance()
        self._stop.check()

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
