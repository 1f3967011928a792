"""A worker of asynchronous training agrees with others through parameter servers, which hold the weights.

They deal samples as tasks, and make the updates; its own are, with local steps, moments alone. So it saves nothing, and
a worker that is started again just asks for samples. The first rank speaks to the servers, and passes weights and
gradients to the others through files in the worker's folder.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from argosy.checkpoint.store import saved_step
from argosy.faults import fault
from argosy.files import sized_file
from argosy.observe.counters import Communication
from argosy.parallel.pieces import PlacedPiece, clip
from argosy.processes.secret import secret_of
from argosy.sync.client import Client, WorkerTask
from argosy.sync.layout import EXCHANGE_FOLDER, ServerLayout, group_folder
from argosy.sync.wire import F32
from argosy.training.agreement import Agreement, WaitForOthers
from argosy.training.parts import Parts
from argosy.training.schedule import Pace
from argosy.training.state import StepUpdate, boxes_written
from argosy.training.step import Requests, StepOutcome, UpdateObserver
from argosy.training.stop import HOLD_S, StoppedEarly


class Servers(Agreement):
    """Workers push gradients to the parameter servers, or what a few local steps have changed, and pull weights."""

    services = ()  # no worker sees the run's steps

    def __init__(self, parts: Parts, pace: Pace):
        super().__init__(parts, pace)
        self._model, self._batches, self._clock = parts.state.model, parts.batches, parts.clock
        self._stop, self._evaluator = parts.stop, parts.evaluator
        self._layout = ServerLayout(parts.run)
        self._mine = boxes_written(self._model.masters, parts.world)
        self._weights, self._gradients = self._files(parts.run_dir / EXCHANGE_FOLDER)
        self._client: Client | None = None
        """The first rank's."""
        self._task: WorkerTask | None = None
        """The task at hand, until it is delivered or given up."""
        self._updates: list[StepUpdate] = []
        """The updates of the task's steps so far."""
        self._laps: list[tuple[Mapping[str, float], Communication]] = []
        """Time by activity of each of them, as the clock gives it."""
        self._delivered: dict[str, Any] | None = None
        """The update that the task's steps have become, of which no line is written yet."""
        self._scored = -1
        self._is_over = False

    def begin(self) -> bool:
        """Begin to speak to the servers. The weights come with the first task."""
        if self._world.is_first:
            group, steps = group_folder(self._parts.run_dir), self._parts.run.train.steps
            # On this machine the folder may tell that the servers have saved the last step.
            self._client = Client(self._layout, secret_of(group), self._weights, lambda: saved_step(group) >= steps)
        self._records.introduce()
        self._records.started(0)
        return True

    def steps(self) -> Iterator[int]:
        """Yield the steps of each task that the servers deal, and score the weights when they ask for it.

        Ends when the run is over, or a signal came to any rank.
        """
        with suppress(StoppedEarly):
            while (task := self._next_task()).kind != "run_is_over":
                if task.kind == "score":
                    self._score(task)
                    continue
                self._task, self._updates, self._laps = task, [], []
                while self._task is not None:
                    yield self._state.step
            self._is_over = True

    def sample_step(self, step: int) -> int:
        assert self._task is not None
        return self._task.item * self._layout.local_steps + len(self._updates)

    def requests(self) -> Requests:
        return Requests(stop=self._stop.is_requested(), quarantine=self._batches.are_unreadable)

    def accepts(self, outcome: StepOutcome) -> bool:
        """Decide whether the step counts. If not, it is repeated with other samples, or its task is given up."""
        if outcome.requests.quarantine:
            self._state.drop_gradient()
            self._batches.quarantine()
            return False
        if not outcome.replicas_differ and math.isfinite(outcome.loss) and math.isfinite(outcome.gradient_norm):
            return True
        task, self._task = self._task, None
        assert task is not None
        self._state.drop_gradient()
        if outcome.replicas_differ:  # all take the weights anew, and another gets the samples if this one is too slow
            self._records.tell("replicas_differ", step=self._state.step)
            self._forget_moments()
            return False
        why = f"loss {outcome.loss}, gradient norm {outcome.gradient_norm}"
        self._records.tell("bad_gradient", step=self._state.step, samples=self._layout.samples(task.item), why=why)
        with self._clock.time("communication"), suppress(StoppedEarly):
            self._answer(lambda client: client.report_bad(task, why))
        return False

    def apply(self, outcome: StepOutcome, learning_rate: float, observer: UpdateObserver | None = None) -> None:
        """Make a local step with this worker's own optimizer, whose moments are its own from one task to the next.

        Where an update is of one step, it is the servers': then only leave the gradient. After the last step of a task
        leave what all have changed.
        """
        update = self.step.update(outcome, learning_rate)
        self._updates.append(update)
        if self._layout.local_steps > 1:
            self.step.apply(update, observer)
        if self._task is not None and self._has_made_all:
            with self._clock.time("optimizer"):
                if self._layout.local_steps > 1:
                    self._leave_change()
                else:
                    self._leave_gradient(update)
            fault("change", step=self._layout.step_of(self._task.version), rank=self._world.rank)

    def after_step(self, outcome: StepOutcome) -> bool:
        """Deliver what the steps of the task have come to, after the last of them. Returns False if a signal came."""
        task = self._task
        if task is None or not self._has_made_all:
            return True
        self._task = None
        self._world.barrier()
        began_s, before = time.monotonic(), self._traffic()
        losses, norms = [one.loss for one in self._updates], [one.gradient_norm for one in self._updates]
        try:
            done = self._answer(lambda client: client.deliver(task, self._gradients, losses, norms))
        except StoppedEarly:
            return False
        if done["update"] is None:
            self._records.tell("gradient_unwanted", step=self._state.step, samples=self._layout.samples(task.item))
            return True
        sent, received = (now - then for now, then in zip(self._traffic(), before, strict=True))
        elements = sum(flat.elements for flat in self._layout.flats)
        push = {
            "site": self._parts.run.site,
            "staleness_steps": done["staleness"],
            "steps": self._layout.local_steps,
            "seconds": round(time.monotonic() - began_s, 6),
            "sent_bytes": sent,
            "received_bytes": received,
            "ratio": round(4 * elements / sent, 3) if sent else 0.0,
        }
        self._delivered = {**done, "item": task.item, "push": push}
        return True

    def is_score_due(self, done: int) -> bool:
        """Return False: the servers say when, and which worker (`steps`)."""
        return False

    def write_lines(self, seconds: Mapping[str, float], more: Mapping[str, Any]) -> bool:
        """Write the lines of the update that the steps of a task have become, with the numbers that steps have there.

        The last of them says what the push took.
        """
        self._laps.append((seconds, self._clock.communication))
        done, self._delivered = self._delivered, None
        if done is None:
            return False
        run, layout = self._parts.run, self._layout
        steps = layout.local_steps
        for number, (update, (took, communication)) in enumerate(zip(self._updates, self._laps, strict=True)):
            step = layout.step_of(done["update"]) + number
            rate = update.learning_rate if steps > 1 else done["rate"]
            record = self._records.step(
                replace(update, step=step, learning_rate=rate),
                (step + 1) * run.tokens_per_step,
                {"sample_ranges": [list(layout.samples_of_step(done["item"], number))]},
                took,
                communication,
                more={"sites": done["push"]} if number == steps - 1 else {},
            )
        score = self._evaluator.score
        self._records.progress.step(record, self._pace.steps, score.loss if score else None, None)
        return True

    def save_if_due(self, requests: Requests) -> bool:
        """Return False: the servers save."""
        return False

    def save_last_state(self) -> bool:
        """Read no more. Returns False: the servers save."""
        self._parts.heartbeat.enter("finishing")
        self._batches.close()
        if self._scored != self._pace.steps:
            self._evaluator.score = None  # another worker has scored the last weights
        return False

    @property
    def is_due(self) -> bool:
        """True until the servers say that the run is over."""
        return not self._is_over

    @property
    def has_report(self) -> bool:
        """True once the run is over: updates of this worker may be in it that an earlier process has made."""
        return self._is_over

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # ---- tasks --------------------------------------------------------------------------------------------------

    @property
    def _has_made_all(self) -> bool:
        """True once all steps of the task are made."""
        return len(self._updates) == self._layout.local_steps

    def _next_task(self) -> WorkerTask:
        """Wait for something to do, and take the weights for it over. Raises: StoppedEarly."""
        self._stop.between_steps()
        if self._world.share_first(lambda: self._stop.is_to_hold, bool):  # all, or some would wait for those that hold
            self._parts.heartbeat.enter("waiting")
            self._stop.hold(HOLD_S)
        with self._clock.time("communication"):
            task = WorkerTask(**self._answer(lambda client: client.next_task()))
            if task.kind != "run_is_over":
                with torch.no_grad():
                    for piece, part in self._own_parts(self._weights):
                        piece.value.copy_(torch.from_numpy(np.array(part)))
                self._model.after_update()
                self._world.barrier()  # the first rank receives the next weights into the same files
        step = self._layout.step_of(task.version)
        metrics = self._records.metrics
        if self._world.is_first and any(line["step"] >= step for line in metrics.last(1)):
            metrics.forget_from(step)  # the servers have gone back, perhaps before this process was started
        self._state.step = step
        return task

    def _score(self, task: WorkerTask) -> None:
        """Score the weights on held-out text, and tell the servers."""
        with self._clock.time("evaluate"):
            self._evaluator.evaluate(self._stop.check)
        self._records.progress.doing("")
        score, self._scored = self._evaluator.score, self._layout.step_of(task.version)
        if score is not None:
            self._records.evaluated(self._scored - 1, score, {})
        if self._client is not None:
            loss, bits_per_byte = (score.loss, score.bits_per_byte) if score else (None, None)
            self._client.report_score(task.version, loss, bits_per_byte)

    def _forget_moments(self) -> None:
        optimizer = self._state.optimizer
        for piece in self._model.masters if self._layout.local_steps > 1 else ():
            state = optimizer.state_of(piece)
            optimizer.load_state(piece, {key: torch.zeros_like(tensor) for key, tensor in state.items()})

    # ---- between ranks and servers ------------------------------------------------------------------------------

    def _leave_gradient(self, update: StepUpdate) -> None:
        """Write this rank's part of the gradient, clipped, to the file that the first rank pushes from."""
        clip(self._model.pieces, update.max_norm, update.gradient_norm)
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

    def _own_parts(self, vectors: list[F32], names: Collection[str] | None = None) -> Iterator[tuple[PlacedPiece, F32]]:
        """Yield this rank's pieces, those of `names` or all, with their part of the servers' vectors."""
        for number, flat in enumerate(self._layout.flats):
            for piece in (*self._model.masters, *self._model.frozen):
                if piece.name in flat.shapes and piece.value.numel() and (names is None or piece.name in names):
                    yield piece, flat.part(vectors[number], *piece.place)

    def _traffic(self) -> tuple[int, int]:
        return (0, 0) if self._client is None else (self._client.sent_bytes, self._client.received_bytes)

    def _answer(self, ask: Callable[[Client], Future[Any]]) -> dict[str, Any]:
        """Return to all ranks what the servers answer to the first one.

        Raises: StoppedEarly if a signal came to any rank; WorldIsOver.
        """
        future = ask(self._client) if self._client is not None else None
        waiting = WaitForOthers(self._records.progress)
        while True:
            self._parts.advance()
            is_there = 1.0 if future is not None and future.done() else 0.0
            has_signal = float(self._stop.number is not None)
            seen = torch.tensor([is_there, has_signal], device=self._world.device)
            there, signals = self._world.sum(seen).tolist()
            if there:
                break
            if signals:
                raise StoppedEarly
            if self._client is not None:
                waiting.is_for(self._client.waits_for)
            waiting.pause()
        waiting.ends()

        def found() -> Any:
            assert future is not None
            answer = future.result()
            return asdict(answer) if isinstance(answer, WorkerTask) else answer.model_dump()

        return self._world.share_first(found, dict[str, Any])

    def _files(self, folder: Path) -> tuple[list[F32], list[F32]]:
        """Map the files through which ranks share weights and gradients: for each, a vector by server."""
        paths = [folder / "weights.f32", folder / "gradient.f32"]
        sizes = [flat.elements for flat in self._layout.flats]
        if self._world.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                sized_file(path, 4 * sum(sizes))
        self._world.barrier()
        mapped = [np.memmap(path, np.float32, "r+", shape=(sum(sizes),)) for path in paths]
        ends = list(itertools.accumulate(sizes))
        weights, gradients = (
            [vector[end - size : end] for size, end in zip(sizes, ends, strict=True)] for vector in mapped
        )
        return weights, gradients
