"""A worker's side: one thread of its first rank that speaks to all servers, and asks again for what does not come.

Nothing that it says has to be said only once, so whatever is lost with a server or a connection is just said again.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from argosy.config.sync import server_name
from argosy.errors import ArgosyError, RunFailed, UserError
from argosy.processes.messages import BadMessage
from argosy.sync.server import messages as say
from argosy.sync.server.keys import KeyPair, settle, zeromq
from argosy.sync.server.layout import ServerLayout
from argosy.sync.server.messages import AHEAD_BYTES, PIECE_BYTES, Message, ServerMessage, packed, unpacked
from argosy.sync.sites.wire import F32

PING_S = 1.0
ASK_AGAIN_S = 3.0
"""A server that was asked for a few bytes, and says nothing for so long, is asked again."""
BYTES_AGAIN_S = 15.0
"""The same while weights or gradients travel."""
SILENT_S = 5.0
"""Silence of a server after which the user is told that it is waited for."""
T = TypeVar("T")


class Closed(Exception):
    """The worker ends."""


class AskAgain(Exception):
    """The servers have gone back to a checkpoint, or took back what they dealt: ask for work again."""


@dataclass(frozen=True)
class WorkerTask:
    """What a worker is to do next; the weights for it are in its vectors."""

    kind: Literal["dealt", "judge", "over"]
    """Compute a gradient; score the weights on held-out text; or end."""
    version: int
    """Updates that made the weights; they may have been made by some more."""
    item: int = -1
    """Its samples are those of steps `item` * local_steps and following ones of a run that is not asynchronous."""
    lease: str = ""


class Client:
    """Speaks to the servers in a thread of its own. Each method returns at once.

    The futures raise Closed, UserError, RunFailed.
    """

    def __init__(self, layout: ServerLayout, secret: bytes, weights: Sequence[F32]):
        """`weights`: the vector of each server, into which weights are received. Raises: UserError."""
        self._layout, self._weights = layout, weights
        self._zmq = zeromq()
        self._context = self._zmq.Context()
        self._server_key, self._own_key = KeyPair.of(secret, "server"), KeyPair.of(secret, "worker")
        self._session, self._ask = uuid.uuid4().hex, 0
        self._residual = [np.zeros_like(part) for part in weights] if layout.wire.name != "fp32" else []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self.waits_for = ""
        """What it waits for, in words; empty if for nothing in particular."""
        self.sent_bytes = self.received_bytes = 0
        self._heard_s = [time.monotonic()] * layout.servers
        self._pinged_s = 0.0
        self._sockets: list[Any] = []
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
        return self._submit(lambda: self._deliver(task, gradients, losses, norms))

    def report_bad(self, task: WorkerTask, why: str) -> Future[say.Committed]:
        """Tell that no gradient can be computed from a task's samples."""
        return self._submit(lambda: self._commit(say.BadGradient(ask=self._number(), lease=task.lease, why=why)))

    def report_score(self, version: int, loss: float | None, bits_per_byte: float | None) -> None:
        """Tell how good the weights of a version are; None without held-out text."""
        said = say.Scored(version=version, loss=loss, bits_per_byte=bits_per_byte)
        self._submit(lambda: self._send(0, said))

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        self._is_closed.set()
        self._jobs.put(None)
        self._thread.join(5.0)

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        self._sockets = [self._connected(number) for number in range(self._layout.servers)]
        while not self._is_closed.is_set():
            try:
                job = self._jobs.get(timeout=PING_S)
            except queue.Empty:
                self._ping()
                continue
            if job is None:
                break
            do, future = job
            try:
                future.set_result(do())
            except BaseException as problem:
                future.set_exception(problem)
        self._end()

    def _end(self) -> None:
        for number, socket in enumerate(self._sockets):
            with suppress(Exception):
                self._send(number, say.Bye())
            socket.close(linger=200)
        self._context.term()

    def _connected(self, number: int) -> Any:
        host, port = self._layout.addresses[number]
        socket = self._context.socket(self._zmq.DEALER)
        settle(socket)
        socket.setsockopt(self._zmq.RECONNECT_IVL, 100)
        socket.setsockopt(self._zmq.RECONNECT_IVL_MAX, 2000)
        socket.curve_serverkey = self._server_key.public
        socket.curve_publickey, socket.curve_secretkey = self._own_key.public, self._own_key.secret
        socket.connect(f"tcp://{host}:{port}")
        self._greet(socket)
        return socket

    def _greet(self, socket: Any) -> None:
        layout = self._layout
        hello = say.Hello(
            version=say.VERSION, site=layout.run.site, session=self._session, model=layout.model, run=layout.identity
        )
        socket.send_multipart(packed(hello))

    def _send(self, number: int, message: ServerMessage, data: bytes | memoryview = b"") -> None:
        self.sent_bytes += len(data)
        self._sockets[number].send_multipart(packed(message, data), copy=True)

    def _ping(self) -> None:
        for number in range(len(self._sockets)):
            self._send(number, say.Ping())
            with suppress(AskAgain, ArgosyError):  # it will be said again to the next question
                while self._take(number, 0.0) is not None:
                    pass  # answers to questions that are settled

    def _take(self, number: int, timeout_s: float) -> tuple[Message, bytes] | None:
        """Return a server's next message; None if none has come. Raises: Closed, UserError, RunFailed, AskAgain."""
        if self._is_closed.is_set():
            raise Closed
        if time.monotonic() - self._pinged_s > PING_S:
            self._pinged_s = time.monotonic()
            self._send(0, say.Ping())  # the first server watches over all workers
        socket = self._sockets[number]
        if not socket.poll(int(1000 * timeout_s)):
            return None
        try:
            message, data = unpacked(socket.recv_multipart())
        except BadMessage as problem:
            raise RunFailed(f"{server_name(number)} said what is no message of this version: {problem}") from None
        self._heard_s[number] = time.monotonic()
        self.received_bytes += len(data)
        if isinstance(message, say.Refused):
            raise (UserError if message.is_input else RunFailed)(
                f"{server_name(number)} refuses this site: {message.why}"
            )
        if isinstance(message, say.HelloNeeded):
            self._greet(socket)
            raise AskAgain
        return message, data

    def _waits(self, number: int, why: str = "") -> None:
        """Tell the user of a server that has been silent for long, or what it said why one has to wait."""
        is_silent = time.monotonic() - self._heard_s[number] > SILENT_S
        self.waits_for = f"no answer from {server_name(number)}" if is_silent else why

    def _number(self) -> int:
        self._ask += 1
        return self._ask

    # ---- what it does -------------------------------------------------------------------------------------------

    def _next_task(self) -> WorkerTask:
        while True:
            try:
                dealt = self._ask_for_work()
                if not isinstance(dealt, say.RunIsOver):
                    for number in range(self._layout.servers):
                        self._pull(number, dealt.epoch, dealt.version)
                self.waits_for = ""
                if isinstance(dealt, say.DealtWork):
                    return WorkerTask("dealt", dealt.version, dealt.item, dealt.lease)
                return WorkerTask(dealt.kind, dealt.version)
            except AskAgain:
                continue

    def _ask_for_work(self) -> say.DealtWork | say.ScoreRequest | say.RunIsOver:
        ask, asked_s, why = 0, 0.0, ""
        while True:
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                ask, asked_s = self._number(), time.monotonic()
                self._send(0, say.AskForWork(ask=ask))
            self._waits(0, why)
            found = self._take(0, 0.5)
            if found is None:
                continue
            message = found[0]
            if isinstance(message, say.DealtWork | say.ScoreRequest | say.RunIsOver) and message.ask == ask:
                return message
            if isinstance(message, say.WaitForWork) and message.ask == ask:
                asked_s = time.monotonic()
                why = f"no samples yet; missing: {', '.join(message.by)}" if message.by else ""

    def _pull(self, number: int, epoch: str, version: int) -> None:
        """Receive the weights of one server. Raises: AskAgain if it does not have them."""
        vector = self._weights[number].view(np.uint8)
        if not len(vector):
            return
        ask, asked_s, tries = 0, -BYTES_AGAIN_S, 0
        missing: set[int] = set()
        while True:
            if time.monotonic() - max(asked_s, self._heard_s[number]) > BYTES_AGAIN_S or not ask:
                if (tries := tries + 1) > 2:
                    raise AskAgain
                ask, asked_s, missing = self._number(), time.monotonic(), set(range(0, len(vector), PIECE_BYTES))
                self._send(number, say.PullWeights(ask=ask, epoch=epoch, version=version))
            self._waits(number)
            found = self._take(number, 0.5)
            if found is None:
                continue
            message, data = found
            if isinstance(message, say.WaitForWork) and message.ask == ask and "again" in message.by:
                raise AskAgain
            if not isinstance(message, say.Weights) or message.ask != ask or message.at not in missing:
                continue
            if len(data) != min(PIECE_BYTES, len(vector) - message.at):
                raise RunFailed(f"{server_name(number)} sent {len(data)} bytes of weights where others belong")
            vector[message.at : message.at + len(data)] = np.frombuffer(data, np.uint8)
            missing.discard(message.at)
            if not missing:
                return

    def _deliver(
        self, task: WorkerTask, gradients: Sequence[F32], losses: Sequence[float], norms: Sequence[float]
    ) -> say.Committed:
        left: list[F32] = []
        try:
            for number, gradient in enumerate(gradients):
                wanted = gradient + self._residual[number] if self._residual else gradient
                encoded = self._layout.wire.encode(wanted)
                if self._residual:
                    left.append(wanted - self._layout.wire.decode(encoded)[: len(wanted)])
                self._push(number, task.lease, encoded)
            said = say.Commit(ask=self._number(), lease=task.lease, losses=list(losses), norms=list(norms))
            done = self._commit(said)
        except AskAgain:
            return say.Committed(ask=0, update=None)
        if left and done.update is not None:
            self._residual = left  # error feedback: what was rounded away is part of the next gradient
        return done

    def _push(self, number: int, lease: str, encoded: Any) -> None:
        """Send a gradient to one server, until all has arrived. Raises: AskAgain."""
        data = memoryview(encoded)
        unsent = list(range(0, len(data), PIECE_BYTES))
        under_way: dict[int, float] = {}
        while unsent or under_way:
            while unsent and len(under_way) * PIECE_BYTES < AHEAD_BYTES:
                at = unsent.pop(0)
                under_way[at] = time.monotonic()
                self._send(number, say.PushPiece(lease=lease, at=at), data[at : at + PIECE_BYTES])
            self._waits(number)
            found = self._take(number, 0.5)
            if found is not None and isinstance(found[0], say.PieceReceived) and found[0].lease == lease:
                under_way.pop(found[0].at, None)
            elif found is None and time.monotonic() - self._heard_s[number] > BYTES_AGAIN_S:
                late = [at for at, sent_s in under_way.items() if time.monotonic() - sent_s > BYTES_AGAIN_S]
                unsent = sorted(late) + unsent
                for at in late:
                    del under_way[at]

    def _commit(self, message: say.Commit | say.BadGradient) -> say.Committed:
        asked_s = 0.0
        while True:
            if time.monotonic() - asked_s > ASK_AGAIN_S:
                asked_s = time.monotonic()
                self._send(0, message)
            self._waits(0)
            try:
                found = self._take(0, 0.5)
            except AskAgain:
                return say.Committed(ask=message.ask, update=None)
            if found is not None and isinstance(found[0], say.Committed) and found[0].ask == message.ask:
                self.waits_for = ""
                return found[0]
