"""The process of a parameter server: `python -m argosy.training.server.main FOLDER NUMBER [--again]`, NUMBER from 0.

Servers and workers speak over the connections that sites have (`sync.links`): the later server calls the earlier one,
workers call all servers. Several servers share the run's folder, for checkpoints.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint.store import not_saved, saved_step
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.sync import server_name
from argosy.data.loader import open_data
from argosy.errors import ArgosyError, RunFailed
from argosy.observe.events import Events
from argosy.observe.screen import Progress
from argosy.observe.terminal import lasting_output
from argosy.processes.child import ChannelClosed, channel_to_parent, end_with_parent
from argosy.processes.connection import WireRecord
from argosy.sync import messages as say
from argosy.sync.layout import RESTARTED, ServerLayout
from argosy.sync.links import Links, keys_of, listener_at
from argosy.sync.messages import AHEAD_BYTES, MESSAGE_PIECE_BYTES
from argosy.training.server.leader import Leader
from argosy.training.server.shard import RequestRefused, ServerShard

SERVER_TURN_S = 0.05
LAST_S = 60.0
"""Once the run is over, workers that were there are waited for so long at most."""
LATE_S = 20.0
"""Once the run is over, workers that have not been there are waited for so long: one that is just starting would wait
for servers that are gone."""
FIRST_SERVER_WORD_S = 15.0
"""A server that is to end waits so long for the first one's word."""
FAILURE_TOLD_S = 0.5
"""Time to tell workers that the run has failed."""
PORT_S = 120.0
"""A server whose command was killed saves its state, and then leaves the port: it is waited for so long."""
FIRST_SERVER = server_name(0)


@dataclass
class WeightStream:
    """Weights on their way to a worker, all of one version."""

    ask: int
    version: int
    data: memoryview
    sent: int = 0


class ParameterServer:
    def __init__(
        self, run: RunConfig, run_dir: Path, number: int, is_again: bool = False, listener: socket.socket | None = None
    ):
        """is_again: in place of one that died. listener: at its address, if it listens already. Raises: UserError."""
        self._run, self._run_dir = run, run_dir
        self._name = server_name(number)
        self._layout = ServerLayout(run)
        self._events = Events(run_dir, self._name)
        self._progress = Progress(enabled=True)
        self._sessions: dict[str, str] = {}
        """Session of each worker that is connected."""
        self._pulls: dict[str, say.PullWeights] = {}
        self._streams: dict[str, WeightStream] = {}
        self._untold: dict[str, list[WireRecord]] = {}
        """Messages for the other servers, to be sent once they are connected."""
        self._is_over = False
        self._looked_s = 0.0
        self.is_alone = False
        """True if it was to end, and the first server did not say so: the newest checkpoint is all that is saved."""
        data = open_data(run.data, run.seed, run.train.batches)
        self._shard = ServerShard(self._layout, number, run_dir, data.identity, self._hear_of_checkpoint)
        address = self._layout.addresses[self._name]
        self._links = self._open(listener or listener_at(self._name, "sync.servers", address, 0.0))
        self._leader: Leader | None = None
        if number == 0:
            self._events.write("coordinator_started", pid=os.getpid(), port=address[1], replaces=is_again)
            self._leader = Leader(
                self._layout,
                run_dir,
                self._shard,
                self._events,
                self._progress,
                self._tell_server,
                self._links.heard_s,
            )
        size = self._shard.size_bytes / 2**20
        self._progress.say(f" {self._name} is at {run.sync.servers[number]}, with {size:.1f} MiB of weights")

    def serve(self, is_ending: Callable[[], bool], late_s: float = LATE_S) -> bool:
        """Serve until the run is over, or `is_ending` returns True, and save the state.

        late_s: `LATE_S`.

        Returns True if the run is over. Raises: RunFailed; StorageError if the state cannot be saved.
        """
        over_s = end_s = 0.0
        while not self._is_over:
            self.turn()
            now = time.monotonic()
            if self._leader is not None and self._leader.is_over:
                over_s = over_s or now
                is_told = self._leader.is_done and (not self._leader.is_expecting or now - over_s > late_s)
                self._is_over = is_told or now - over_s > LAST_S
            elif self._leader is None:
                self._is_over |= self._has_missed_the_end(now)
            if is_ending():
                end_s = end_s or now
                # The first server says at which version all save; by itself another one can save nothing whole.
                self.is_alone = not self._is_over and self._leader is None and now - end_s > FIRST_SERVER_WORD_S
                self._is_over |= self._leader is not None or self.is_alone
        if self._leader is not None:
            self._leader.sync()
            for name in self._layout.addresses:
                if name != self._name:
                    self._tell_server(name, say.Finish())
        error = self._shard.save_last()
        is_over = self._shard.version >= self._layout.updates or self._is_saved
        code, why = (0, "all updates are made") if is_over else (128 + signal.SIGTERM, "it was asked to stop")
        failure = not_saved(self._run_dir, self._layout.step_of(self._shard.version), error) if error else None
        if failure is not None:
            code, why = failure.exit_code, str(failure)
        if self._leader is not None:
            self._events.write("finish", exit_code=code, finished=not code, why=why)
        if failure is not None and not self.is_alone:
            raise failure
        return is_over

    @property
    def _is_saved(self) -> bool:
        """True if the run's last checkpoint is there."""
        return saved_step(self._run_dir) >= self._run.train.steps

    def _has_missed_the_end(self, now: float) -> bool:
        """Return True if the first server is gone, and the run's last checkpoint is there: its last word was lost."""
        silent_s = now - max(self._links.heard_s[FIRST_SERVER], self._looked_s)
        if silent_s < self._run.sync.patience_s:
            return False
        self._looked_s = now
        return self._is_saved

    def turn(self, timeout_s: float = SERVER_TURN_S) -> None:
        """Take what has come, and look after what has to be done. Raises: RunFailed."""
        for name, message, data in self._links.turn(timeout_s):
            try:
                self._hear(name, message, data)
            except RequestRefused as problem:
                self._links.refuse(name, str(problem)[:1000])
                self._forget(name, "it was refused")
        for name in [name for name in self._sessions if name not in self._links.sites]:
            self._forget(name)
        self._send_weights()
        self._shard.poll()
        if self._leader is not None:
            self._leader.tick()
            if self._leader.failure:
                self._links.tell_all(say.FailureNotice(why=self._leader.failure))
                until = time.monotonic() + FAILURE_TOLD_S
                while time.monotonic() < until:
                    self._links.turn(SERVER_TURN_S)
                raise RunFailed(self._leader.failure)

    def close(self) -> None:
        self._shard.close()
        self._links.close()
        self._progress.close()

    # ---- connections --------------------------------------------------------------------------------------------

    def _open(self, listener: socket.socket | None) -> Links[say.FromPart]:
        layout = self._layout
        secret, tls = keys_of(self._run, self._run_dir)
        hello = say.PartHello(
            version=say.VERSION,
            site=self._name,
            session=uuid.uuid4().hex,
            model=layout.model,
            run=layout.identity,
        )
        addresses = {**layout.addresses, **dict.fromkeys(layout.workers)}
        return Links(self._name, addresses, listener, secret, tls, say.FROM_PART, lambda: hello, self._refused)

    def _tell_server(self, name: str, message: WireRecord) -> None:
        """Tell another server, once it is connected; what was not told before a new beginning is told no more."""
        if isinstance(message, say.GoToVersion):
            self._untold.pop(name, None)
        if name in self._links.sites and name not in self._untold:
            self._links.tell(name, message)
        elif not isinstance(message, say.CheckServer):  # connected or not: what is untold comes first
            self._untold.setdefault(name, []).append(message)

    def _refused(self, who: str, why: str) -> None:
        self._events.write("site_refused", site=who, why=why)
        self._progress.say(f" {who} is not let in: {why}", "yellow")

    def _forget(self, name: str, why: str = "") -> None:
        """Forget a connection; why: the worker has left for good."""
        session = self._sessions.pop(name, "")
        self._pulls.pop(name, None)
        self._streams.pop(name, None)
        if self._leader is not None and why:
            self._leader.left(name, session, why)

    # ---- messages -----------------------------------------------------------------------------------------------

    def _hear(self, name: str, message: say.FromPart, data: bytes) -> None:
        """Do what a message asks for. Raises: RequestRefused."""
        if name in self._layout.addresses:
            self._hear_server(name, message)
        elif isinstance(message, say.PartHello):
            self._forget(name)
            self._sessions[name] = message.session
            if self._leader is not None:
                self._leader.arrived(name, message.session)
        elif name in self._sessions:
            self._serve(name, message, data)
        else:
            raise RequestRefused("it announced its end")

    def _serve(self, name: str, message: say.FromPart, data: bytes) -> None:
        """Do what a worker asks for. Raises: RequestRefused."""
        leader = self._leader
        match message:
            case say.PullWeights():
                self._pulls[name] = message
                self._streams.pop(name, None)
            case say.PushPiece():
                self._shard.stage(name, message.lease, message.at, data)
                self._links.tell(name, say.PieceReceived(lease=message.lease, at=message.at))
            case say.WorkerLeaves():
                self._forget(name, "it ended")
            case say.AskForWork() if leader is not None:
                leader.arrived(name, self._sessions[name])
                leader.asked(name, message, partial(self._links.tell, name))
            case say.Commit() if leader is not None:
                self._links.tell(name, leader.commit(name, message))
            case say.BadGradient() if leader is not None:
                self._links.tell(name, leader.bad(name, message))
            case say.Scored() if leader is not None:
                leader.scored(name, message)
            case _:
                raise RequestRefused(f"{self._name} answers no {message.kind}")

    def _send_weights(self) -> None:
        """Begin to send weights to those that asked for a version that is there now, and go on with what is begun."""
        for name, pull in list(self._pulls.items()):
            try:
                data = self._shard.weights(pull.generation, pull.version)
            except RequestRefused:
                self._links.tell(name, say.WeightsGone(ask=pull.ask))
                del self._pulls[name]
                continue
            if data is not None:
                self._streams[name] = WeightStream(pull.ask, self._shard.version, memoryview(data))
                del self._pulls[name]
        for name, stream in list(self._streams.items()):
            while stream.sent < len(stream.data) and self._links.unsent_bytes(name) < AHEAD_BYTES:
                piece = say.Weights(ask=stream.ask, version=stream.version, at=stream.sent)
                self._links.tell(name, piece, stream.data[stream.sent : stream.sent + MESSAGE_PIECE_BYTES])
                stream.sent += MESSAGE_PIECE_BYTES
            if stream.sent >= len(stream.data):
                del self._streams[name]

    # ---- servers ------------------------------------------------------------------------------------------------

    def _hear_server(self, name: str, message: say.FromPart) -> None:
        """Hear another server: the first one is obeyed. Raises: RequestRefused."""
        match message:
            case say.PartHello():
                for untold in self._untold.pop(name, []):
                    self._links.tell(name, untold)
            case say.GoToVersion() | say.Apply() | say.CheckServer() | say.Finish() if name == FIRST_SERVER:
                self._obey(message)
            case say.ServerStatus() if self._leader is not None:
                self._leader.hear_server(name, message)
            case _:
                raise RequestRefused(f"{self._name} takes no {message.kind} from {name}")

    def _obey(self, message: say.Order) -> None:
        """Do what the first server says."""
        shard, problem = self._shard, ""
        try:
            match message:
                case say.GoToVersion():
                    shard.begin(message.generation, message.version)
                case say.Apply():
                    shard.apply(message.generation, message.update, message.lease, message.rate)
                    if message.save:
                        shard.save()
                    return
                case say.CheckServer() if message.generation == shard.generation and message.version != shard.version:
                    problem = f"it is at version {shard.version} instead of {message.version}"
                case say.Finish():
                    self._is_over = True
        except RequestRefused as refusal:
            problem = str(refusal)
        except ArgosyError as error:
            self._links.tell(FIRST_SERVER, self._status(str(error)[:1000]))
            raise
        self._links.tell(FIRST_SERVER, self._status(problem))

    def _status(self, problem: str) -> say.ServerStatus:
        return say.ServerStatus(generation=self._shard.generation, version=self._shard.version, problem=problem)

    def _hear_of_checkpoint(self, news: str, /, **facts: Any) -> None:
        self._events.write(news, **facts)
        if news == "save_failed":
            self._progress.say(f"checkpoint of step {facts['step']} FAILED: {facts['error']}", "yellow")


@lasting_output()  # as the command that holds it
def main() -> None:
    """Serve until the run is over, or the parent says so or is gone."""
    run_dir, number, ending = Path(sys.argv[1]), int(sys.argv[2]), threading.Event()
    run, channel = load(run_dir / "run.toml"), channel_to_parent()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))

    end_with_parent(channel, ending, is_gone=ending)
    try:
        name, tell = server_name(number), Progress(enabled=True).say
        listener = listener_at(name, "sync.servers", ServerLayout(run).addresses[name], PORT_S, ending.is_set, tell)
        is_over, is_saved = False, False
        if listener is not None:
            server = ParameterServer(run, run_dir, number, RESTARTED in sys.argv, listener)
            is_over, is_saved = server.serve(ending.is_set), not server.is_alone
            server.close()
    except ArgosyError as problem:
        with suppress(ChannelClosed):
            channel.send("failed", code=problem.exit_code, text=str(problem))
        sys.exit(problem.exit_code)
    with suppress(ChannelClosed):  # the command was killed: the state is saved nevertheless
        channel.send("done", finished=is_over, saved=is_saved)


if __name__ == "__main__":
    main()
