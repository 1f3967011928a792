"""A worker's side: one thread of its first rank that speaks to all parameter servers.

Nothing that it says has to be said only once, so whatever is lost with a server or a connection is just said again.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from argosy.config.sync import server_name
from argosy.errors import RunFailed, UserError
from argosy.sync import messages as say
from argosy.sync.layout import ServerLayout
from argosy.sync.links import CALL_LOOK_S, SAME_KEYS, Links, contexts
from argosy.sync.messages import AHEAD_BYTES, FROM_PART, MESSAGE_PIECE_BYTES, FromPart
from argosy.sync.wire import F32

IDLE_S = 0.2
"""Seconds between two looks after the connections while there is nothing to do."""
WAIT_S = 0.5
SERVER_SILENT_S = 5.0
"""Silence of a server after which the user is told that it is waited for."""
T = TypeVar("T")
Answer = TypeVar("Answer", bound=say.NumberedMessage)


class WorkerStopped(Exception):
    """The worker ends."""


class ServersGone(Exception):
    """The servers have ended with the run."""


class WorkRevoked(Exception):
    """The servers have gone back to a checkpoint, or took back what they dealt: ask for work again."""


@dataclass(frozen=True)
class WorkerTask:
    """The next task of a worker; the weights for it are in its vectors."""

    kind: Literal["dealt", "score", "run_is_over"]
    """Compute a gradient; score the weights on held-out text; or end."""
    version: int
    """Updates that made the weights; they may have been made by some more."""
    item: int = -1
    """Its samples are those of steps `item` * local_steps and following ones of a run that is not asynchronous."""
    lease: str = ""


class Client:
    """Speaks to the servers in a thread of its own. Each method returns at once.

    The futures raise WorkerStopped, UserError, RunFailed.
    """

    def __init__(
        self,
        layout: ServerLayout,
        secret: bytes,
        weights: Sequence[F32],
        is_finished: Callable[[], bool] = lambda: False,
    ):
        """weights: the vector of each server, into which weights are received. is_finished: returns True if the run's
        last checkpoint is seen from here. Raises: UserError.
        """
        self._layout, self._weights, self._secret, self._is_finished = layout, weights, secret, is_finished
        self._tls = contexts(secret) if layout.run.sync.tls else None
        self._names = [server_name(number) for number in range(layout.servers)]
        self._session, self._asked = uuid.uuid4().hex, 0
        self._residual = [np.zeros_like(part) for part in weights] if layout.wire.name != "fp32" else []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self.waits_for = ""
        """The thing that it waits for, in words; empty if there is none."""
        self.sent_bytes = self.received_bytes = 0
        self._inbox: dict[str, deque[tuple[FromPart, bytes]]] = {name: deque() for name in self._names}
        self._connections = dict.fromkeys(self._names, 0)
        """The number of connections to each server so far: a question on an earlier one may be lost."""
        self._refusals: dict[str, str] = {}
        """Why servers refused this worker, or were refused, at any time."""
        self._failure = ""
        """Why the run has failed; empty if it has not."""
        self._links = self._open()
        self._thread = threading.Thread(target=self._run, name="argosy-servers", daemon=True)
        self._thread.start()

    def next_task(self) -> Future[WorkerTask]:
        """Ask for samples, and pull the weights for them."""
        return self._submit(self._next_task)

    def deliver(
        self, task: WorkerTask, gradients: Sequence[F32], losses: Sequence[float], norms: Sequence[float]
    ) -> Future[say.Committed]:
        """Push a gradient, or what local steps changed, by server, and commit it; losses, norms: of each step.

        `update` of the result is None if it was not wanted any more.
        """
        return self._submit(lambda: self._wanted(lambda: self._deliver(task, gradients, losses, norms)))

    def report_bad(self, task: WorkerTask, why: str) -> Future[say.Committed]:
        """Tell that no gradient can be computed from a task's samples."""
        bad = say.BadGradient(ask=self._number(), lease=task.lease, why=why)
        return self._submit(lambda: self._wanted(lambda: self._answer(bad, say.Committed)))

    def report_score(self, version: int, loss: float | None, bits_per_byte: float | None) -> None:
        """Tell how good the weights of a version are; None without held-out text."""
        said = say.Scored(version=version, loss=loss, bits_per_byte=bits_per_byte)
        self._submit(lambda: self._links.tell(self._names[0], said))

    def close(self) -> None:
        self._is_closed.set()
        self._jobs.put(None)
        self._thread.join(5.0)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        while not self._is_closed.is_set():
            self._turn(0.0)
            try:
                job = self._jobs.get(timeout=IDLE_S if len(self._links.sites) == len(self._names) else CALL_LOOK_S)
            except queue.Empty:
                continue
            if job is None:
                break
            do, future = job
            try:
                future.set_result(do())
            except BaseException as problem:
                future.set_exception(problem)
        with suppress(OSError):
            self._links.tell_all(say.WorkerLeaves())
        self._links.close()

    def _open(self) -> Links[FromPart]:
        layout, me = self._layout, self._layout.run.site
        hello = say.PartHello(
            version=say.VERSION, site=me, session=self._session, model=layout.model, run=layout.identity
        )
        return Links(
            me, {**layout.addresses, me: None}, None, self._secret, self._tls, FROM_PART, lambda: hello, self._refused
        )

    def _refused(self, name: str, why: str) -> None:
        self._refusals[name] = why

    def _turn(self, timeout_s: float) -> None:
        """Take what has come. Messages of a connection that is no more are dropped."""
        for name, message, data in self._links.turn(timeout_s):
            self.received_bytes += len(data)
            if isinstance(message, say.PartHello):
                self._connections[name] += 1
                self._inbox[name].clear()
            elif isinstance(message, say.FailureNotice):
                self._failure = f"{name}: {message.why}"
            else:
                self._inbox[name].append((message, data))

    def _take(self, name: str) -> tuple[FromPart, bytes] | None:
        """Wait a little for a server's next message; None if none has come.

        Raises: WorkerStopped, UserError, RunFailed; ServersGone if it is silent for `sync.patience_s`, and the run is
        finished.
        """
        if not self._inbox[name]:
            self._turn(WAIT_S)
        if self._is_closed.is_set():
            raise WorkerStopped
        for who, why in self._refusals.items():
            if not why.endswith(SAME_KEYS):  # another process may have the port of a server that is to come
                raise UserError(f"{who}: {why}")
        if self._failure:
            raise RunFailed(self._failure)
        if self._inbox[name]:
            return self._inbox[name].popleft()
        if time.monotonic() - self._links.heard_s[name] > self._layout.run.sync.patience_s and self._is_finished():
            raise ServersGone
        return None

    def _waits(self, name: str, why: str = "") -> None:
        """Tell the user of a server that has been silent for long, or what it said why one has to wait."""
        is_silent = time.monotonic() - self._links.heard_s[name] > SERVER_SILENT_S
        is_refused = name in self._refusals and name not in self._links.sites
        refusal = f" ({self._refusals[name]})" if is_refused else ""
        self.waits_for = f"no answer from {name}{refusal}" if is_silent or refusal else why

    def _number(self) -> int:
        self._asked += 1
        return self._asked

    def _answer(self, question: say.NumberedMessage, kind: type[Answer]) -> Answer:
        """Ask the first server, again on each new connection, and return its answer, which is of `kind`.

        Raises: as `_take`.
        """
        name, said_on, why = self._names[0], 0, ""
        while True:
            if self._connections[name] != said_on and name in self._links.sites:
                said_on = self._connections[name]
                self._links.tell(name, question)
            self._waits(name, why)
            found = self._take(name)
            if found is None or not isinstance(found[0], say.NumberedMessage) or found[0].ask != question.ask:
                continue
            if isinstance(found[0], kind):
                self.waits_for = ""
                return found[0]
            if isinstance(found[0], say.WaitForWork):
                why = f"no samples yet; missing: {', '.join(found[0].by)}" if found[0].by else ""

    # ---- tasks --------------------------------------------------------------------------------------------------

    def _next_task(self) -> WorkerTask:
        while True:
            ask = say.AskForWork(ask=self._number())
            try:
                task = self._answer(ask, say.NextTask)
                if isinstance(task, say.RunIsOver):
                    return WorkerTask(task.kind, task.version)
                for number in range(self._layout.servers):
                    self._pull(number, task.generation, task.version)
            except ServersGone:
                return WorkerTask("run_is_over", self._layout.updates)
            except WorkRevoked:
                continue
            self.waits_for = ""
            if isinstance(task, say.DealtWork):
                return WorkerTask(task.kind, task.version, task.item, task.lease)
            return WorkerTask("score", task.version)

    def _pull(self, number: int, generation: str, version: int) -> None:
        """Receive the weights of one server. Raises: WorkRevoked if it does not have them."""
        name, vector = self._names[number], self._weights[number].view(np.uint8)
        ask, said_on = 0, 0
        missing = set(range(0, len(vector), MESSAGE_PIECE_BYTES))
        while missing:
            if self._connections[name] != said_on and name in self._links.sites:
                ask, said_on = self._number(), self._connections[name]
                missing = set(range(0, len(vector), MESSAGE_PIECE_BYTES))  # all of one version
                self._links.tell(name, say.PullWeights(ask=ask, generation=generation, version=version))
            self._waits(name)
            found = self._take(name)
            if found is None:
                continue
            message, data = found
            if isinstance(message, say.WeightsGone) and message.ask == ask:
                raise WorkRevoked
            if not isinstance(message, say.Weights) or message.ask != ask or message.at not in missing:
                continue
            if len(data) != min(MESSAGE_PIECE_BYTES, len(vector) - message.at):
                raise RunFailed(f"{name} sent {len(data)} bytes of weights for another place")
            vector[message.at : message.at + len(data)] = np.frombuffer(data, np.uint8)
            missing.discard(message.at)

    @staticmethod
    def _wanted(commit: Callable[[], say.Committed]) -> say.Committed:
        """Return what the servers answer; that it was not wanted, if they have ended with the run."""
        try:
            return commit()
        except ServersGone:
            return say.Committed(ask=0, update=None)

    def _deliver(
        self, task: WorkerTask, gradients: Sequence[F32], losses: Sequence[float], norms: Sequence[float]
    ) -> say.Committed:
        left: list[F32] = []
        for number, gradient in enumerate(gradients):
            wanted = gradient + self._residual[number] if self._residual else gradient
            encoded = self._layout.wire.encode(wanted)
            if self._residual:
                left.append(wanted - self._layout.wire.decode(encoded)[: len(wanted)])
            self._push(self._names[number], task.lease, encoded.data)
        commit = say.Commit(ask=self._number(), lease=task.lease, losses=list(losses), norms=list(norms))
        done = self._answer(commit, say.Committed)
        if left and done.update is not None:
            self._residual = left  # error feedback: what was rounded away is part of the next gradient
        return done

    def _push(self, name: str, lease: str, data: memoryview) -> None:
        """Send a gradient to one server, until all has arrived."""
        unsent = deque(range(0, len(data), MESSAGE_PIECE_BYTES))
        under_way: list[int] = []
        said_on = self._connections[name]
        while unsent or under_way:
            if self._connections[name] != said_on:
                said_on = self._connections[name]
                unsent.extendleft(reversed(under_way))
                under_way = []
            while unsent and len(under_way) * MESSAGE_PIECE_BYTES < AHEAD_BYTES and name in self._links.sites:
                at = unsent.popleft()
                under_way.append(at)
                piece = data[at : at + MESSAGE_PIECE_BYTES]
                self.sent_bytes += len(piece)
                self._links.tell(name, say.PushPiece(lease=lease, at=at), piece)
            self._waits(name)
            found = self._take(name)
            if found is not None and isinstance(found[0], say.PieceReceived) and found[0].lease == lease:
                with suppress(ValueError):
                    under_way.remove(found[0].at)
