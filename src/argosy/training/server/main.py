"""The process of a parameter server: `python -m argosy.training.server.main FOLDER NUMBER [--again]`, NUMBER from 0.

All that comes over the wire goes through `unpacked`, which checks it; connections without the workers' key are turned
away before that (`sync.server.keys`). Several servers share the run's folder, for checkpoints.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from argosy.config.address import interface_of
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.servers import server_name
from argosy.data.loader import open_data
from argosy.errors import ArgosyError, RunFailed, UserError
from argosy.observe.events import Events
from argosy.observe.screen import Progress
from argosy.processes.channel import Gone
from argosy.processes.child import channel_to_parent, messages
from argosy.processes.messages import BadMessage
from argosy.processes.secret import secret_of
from argosy.sync.server import messages as say
from argosy.sync.server.keys import AllowedKeys, KeyPair, settle, zeromq
from argosy.sync.server.layout import AGAIN, ServerLayout
from argosy.sync.server.messages import PIECE_BYTES, ServerMessage, packed, unpacked
from argosy.training.server.leader import Leader
from argosy.training.server.shard import Refuses, ServerShard

TURN_MS = 50
LAST_S = 60.0
"""Once the run is over, workers that were there are waited for so long at most."""
FOLLOW_S = 15.0
"""A server that is to end waits so long for the first one's word."""
FORGET_S = 60.0
"""A peer that says nothing for so long has to say hello again."""
REFUSED_AGAIN_S = 30.0
"""The same refusal is reported so often at most."""
PORT_S, PORT_LOOK_S = 120.0, 0.2
"""A server whose command was killed saves its state, and then leaves the port: it is waited for so long."""


@dataclass
class Peer:
    """The worker at the other end of a connection."""

    site: str
    session: str
    heard_s: float


class ParameterServer:
    """One parameter server."""

    def __init__(self, run: RunConfig, run_dir: Path, number: int, is_again: bool = False):
        """is_again: in place of one that died. Raises: UserError."""
        self._run, self._number, self._run_dir = run, number, run_dir
        self._name = server_name(number)
        self._layout = ServerLayout(run)
        self._events = Events(run_dir, self._name)
        self._progress = Progress(enabled=True)
        self._peers: dict[bytes, Peer] = {}
        self._pulls: dict[bytes, say.PullWeights] = {}
        self._refused_s: dict[str, float] = {}
        self._is_over = False
        self.is_alone = False
        """True if it was to end, and the first server did not say so: the newest checkpoint is all that is saved."""
        data = open_data(run.data, run.seed, run.train.batches)
        self._shard = ServerShard(self._layout, number, run_dir, data.identity, self._hear_of_checkpoint)
        secret = secret_of(run_dir)
        self._zmq = zeromq()
        self._context = self._zmq.Context()
        self._keys, self._workers = KeyPair.of(secret, "server"), KeyPair.of(secret, "worker")
        self._first = KeyPair.of(secret, "first")
        self._doorman = self._open_door()
        self._router = self._bound()
        self._links = {} if number else {n: self._link(n) for n in range(1, self._layout.servers)}
        self._leader: Leader | None = None
        if number == 0:
            port = self._layout.addresses[0][1]
            self._events.write("coordinator_started", pid=os.getpid(), port=port, replaces=is_again)
            self._leader = Leader(self._layout, run_dir, self._shard, self._events, self._progress, self._tell_server)
        self._poller = self._zmq.Poller()
        for link in (self._router, *self._links.values()):
            self._poller.register(link, self._zmq.POLLIN)
        size = self._shard.size_bytes / 2**20
        self._progress.say(f" {self._name} is at {run.sync.servers[number]}, with {size:.1f} MiB of weights")

    def serve(self, is_ending: Callable[[], bool]) -> bool:
        """Serve until the run is over, or `is_ending` returns True, and save the state.

        Returns True if the run is over. Raises: RunFailed.
        """
        over_s = end_s = 0.0
        while not self._is_over:
            self.turn()
            now = time.monotonic()
            if self._leader is not None and self._leader.is_over:
                over_s = over_s or now
                self._is_over = self._leader.is_done or now - over_s > LAST_S
            if is_ending():
                end_s = end_s or now
                # The first server says at which version all save; by itself another one can save nothing whole.
                self.is_alone = not self._is_over and self._leader is None and now - end_s > FOLLOW_S
                self._is_over |= self._leader is not None or self.is_alone
        for number in self._links:
            self._tell_server(number, say.Finish())
        self._shard.save()
        self._shard.close(wait=True)
        is_over = self._shard.version >= self._layout.updates
        if self._leader is not None:
            why = "all updates are made" if is_over else "it was asked to stop"
            code = 0 if is_over else 128 + signal.SIGTERM
            self._events.write("finish", exit_code=code, finished=is_over, why=why)
        return is_over

    def turn(self) -> None:
        """Take what has come, and look after what has to be done. Raises: RunFailed."""
        found = dict(self._poller.poll(TURN_MS))
        for number, link in self._links.items():
            while link in found and link.poll(0):
                self._hear_server(number, link.recv_multipart())
        budget = 64
        while self._router in found and budget and self._router.poll(0):
            parts = self._router.recv_multipart(copy=False)
            identity, *frames = (bytes(part) for part in parts)
            is_first = parts[0].get("User-Id") == self._first.public.decode()  # the key that the other end has proven
            self._hear(identity, frames, is_first)
            budget -= 1
        self._answer_pulls()
        self._shard.poll()
        if self._leader is not None:
            self._leader.tick()
            if self._leader.failure:
                for identity in self._peers:
                    self._send(identity, say.Refused(why=self._leader.failure, is_input=False))
                time.sleep(0.5)
                raise RunFailed(self._leader.failure)
        now = time.monotonic()
        self._peers = {i: peer for i, peer in self._peers.items() if now - peer.heard_s < FORGET_S}

    def close(self) -> None:
        """Let go of all."""
        self._shard.close()
        for link in (self._router, *self._links.values()):
            link.close(linger=1000)
        self._doorman.stop()
        self._context.destroy(linger=1000)
        self._progress.close()

    # ---- sockets ------------------------------------------------------------------------------------------------

    def _open_door(self) -> Any:
        """Start what lets in workers and the first server alone: before anything is bound, since nobody is asked
        otherwise."""
        from zmq.auth.thread import ThreadAuthenticator

        doorman = ThreadAuthenticator(self._context)
        doorman.start()
        doorman.configure_curve_callback(
            domain="argosy", credentials_provider=AllowedKeys(self._workers.public, self._first.public)
        )
        return doorman

    def _bound(self) -> Any:
        socket = self._context.socket(self._zmq.ROUTER)
        settle(socket)
        socket.setsockopt(self._zmq.ZAP_DOMAIN, b"argosy")
        socket.setsockopt(self._zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        host, port = self._layout.addresses[self._number]
        socket.bind(f"tcp://{interface_of(host) or '*'}:{port}")
        return socket

    def _link(self, number: int) -> Any:
        socket = self._context.socket(self._zmq.DEALER)
        settle(socket)
        socket.curve_serverkey = self._keys.public
        socket.curve_publickey, socket.curve_secretkey = self._first.public, self._first.secret
        host, port = self._layout.addresses[number]
        socket.connect(f"tcp://{host}:{port}")
        return socket

    def _tell_server(self, number: int, message: ServerMessage) -> None:
        self._links[number].send_multipart(packed(message))

    def _send(self, identity: bytes, message: ServerMessage, data: bytes | memoryview = b"") -> None:
        self._router.send_multipart([identity, *packed(message, data)], copy=not len(data))

    # ---- messages -----------------------------------------------------------------------------------------------

    def _hear(self, identity: bytes, frames: list[bytes], is_first: bool) -> None:
        """Do what a message asks for. is_first: it is from the first server."""
        try:
            message, data = unpacked(frames)
        except BadMessage as problem:
            self._refuse(identity, "?", f"what it says is no message of this version ({problem})")
            return
        if is_first and isinstance(message, say.Begin | say.Apply | say.CheckServer | say.Finish):
            self._obey(identity, message)
            return
        if isinstance(message, say.Hello):
            self._greet(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            self._send(identity, say.HelloNeeded())
            return
        peer.heard_s = time.monotonic()
        try:
            self._serve(identity, peer, message, data)
        except Refuses as problem:
            self._refuse(identity, peer.site, str(problem))

    def _serve(self, identity: bytes, peer: Peer, message: say.Message, data: bytes) -> None:
        """Do what a worker asks for. Raises: Refuses."""
        leader = self._leader
        if leader is not None:
            leader.heard(peer.site)
        match message:
            case say.PullWeights():
                self._pulls[identity] = message
            case say.PushPiece():
                self._shard.stage(peer.site, message.lease, message.at, data)
                self._send(identity, say.PieceReceived(lease=message.lease, at=message.at))
            case say.Bye():
                self._shard.forget(peer.site)
                if leader is not None:
                    leader.left(peer.site, peer.session)
            case say.AskForWork() if leader is not None:
                leader.arrived(peer.site, peer.session)
                leader.asked(peer.site, message, partial(self._send, identity))
            case say.Commit() if leader is not None:
                self._send(identity, leader.commit(peer.site, message))
            case say.BadGradient() if leader is not None:
                self._send(identity, leader.bad(peer.site, message))
            case say.Scored() if leader is not None:
                leader.scored(peer.site, message)
            case say.Ping():
                pass
            case _:
                raise Refuses(f"{message.kind} is nothing that {self._name} is asked for")

    def _greet(self, identity: bytes, hello: say.Hello) -> None:
        """Let a worker in, or tell it why not."""
        if problem := self._problem(hello):
            self._refuse(identity, hello.site, problem)
            return
        self._peers[identity] = Peer(hello.site, hello.session, time.monotonic())
        if self._leader is not None:
            self._leader.arrived(hello.site, hello.session)
        self._send(identity, say.Welcome())

    def _problem(self, hello: say.Hello) -> str:
        if hello.version != say.VERSION:
            return f"it speaks version {hello.version}, and {self._name} {say.VERSION}: use one version of Argosy"
        if hello.site not in self._layout.workers:
            return f'no site is called "{hello.site}"; the sites are {", ".join(self._layout.workers)}'
        if hello.model != self._layout.model:
            return "it trains another model, or counts other servers: use the same run file"
        if hello.run != self._layout.identity:
            return "it is of another run: all need the same run file, with the same seed, data, batch and optimizer"
        return ""

    def _refuse(self, identity: bytes, site: str, why: str) -> None:
        peer = self._peers.pop(identity, None)
        if peer is not None and self._leader is not None:
            self._leader.left(peer.site, peer.session, "it was refused")
        self._send(identity, say.Refused(why=why[:1000]))
        self._refused(site, why)

    def _refused(self, site: str, why: str) -> None:
        """Report a refusal, once in a while."""
        now, key = time.monotonic(), f"{site} {why}"
        if now - self._refused_s.get(key, -REFUSED_AGAIN_S) >= REFUSED_AGAIN_S and len(self._refused_s) < 1000:
            self._refused_s[key] = now
            self._events.write("site_refused", site=site, why=why)
            self._progress.say(f" {site} is not let in: {why}", "yellow")

    def _answer_pulls(self) -> None:
        """Send weights to those that asked for a version that is there now."""
        waiting: dict[bytes, say.PullWeights] = {}
        for identity, pull in self._pulls.items():
            if identity not in self._peers:
                continue
            try:
                data = self._shard.weights(pull.epoch, pull.version)
            except Refuses:
                self._send(identity, say.WaitForWork(ask=pull.ask, by=["again"]))
                continue
            if data is None:
                waiting[identity] = pull
                continue
            whole = memoryview(data)
            for at in range(0, len(whole), PIECE_BYTES):
                piece = say.Weights(ask=pull.ask, version=self._shard.version, at=at)
                self._send(identity, piece, whole[at : at + PIECE_BYTES])
        self._pulls = waiting

    def _obey(self, identity: bytes, message: say.Begin | say.Apply | say.CheckServer | say.Finish) -> None:
        """Do what the first server says."""
        shard, problem = self._shard, ""
        try:
            match message:
                case say.Begin():
                    shard.begin(message.epoch, message.version)
                case say.Apply():
                    shard.apply(message.epoch, message.update, message.lease, message.rate)
                    if message.save:
                        shard.save()
                    return
                case say.CheckServer() if message.epoch == shard.epoch and message.version != shard.version:
                    problem = f"it is at version {shard.version} instead of {message.version}"
                case say.Finish():
                    self._is_over = True
        except Refuses as refusal:
            problem = str(refusal)
        except ArgosyError as error:
            self._send(identity, say.ServerStatus(epoch=shard.epoch, version=shard.version, problem=str(error)[:1000]))
            raise
        self._send(identity, say.ServerStatus(epoch=shard.epoch, version=shard.version, problem=problem))

    def _hear_server(self, number: int, frames: list[bytes]) -> None:
        try:
            message, _ = unpacked(frames)
        except BadMessage as problem:
            self._refused(server_name(number), f"what it says is no message of this version ({problem})")
            return
        if isinstance(message, say.ServerStatus) and self._leader is not None:
            self._leader.hear_server(number, message)

    def _hear_of_checkpoint(self, news: str, /, **facts: Any) -> None:
        self._events.write(news, **facts)
        if news == "save_failed":
            self._progress.say(f"checkpoint of step {facts['step']} FAILED: {facts['error']}", "yellow")


def wait_for_port(address: tuple[str, int], is_ending: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Wait until nobody listens at the address, which is this machine's, or `is_ending` returns True.

    Raises: UserError if it stays taken, or may not be taken.
    """
    host, port = address
    end_s = 0.0
    while (problem := _port_problem(interface_of(host), port)) and not is_ending():
        now = time.monotonic()
        if problem.errno != errno.EADDRINUSE or (end_s and now > end_s):
            raise UserError(f"sync.servers: cannot listen at port {port} ({problem.strerror}). Give another port.")
        if not end_s:
            end_s = now + PORT_S
            say(f" port {port} is in use; waiting for up to {PORT_S:.0f} s")
        time.sleep(PORT_LOOK_S)


def _port_problem(interface: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((interface, port))
        except OSError as problem:
            return problem
    return None


def main() -> None:
    """Serve until the run is over, or the parent says so or is gone."""
    run_dir, number, ending = Path(sys.argv[1]), int(sys.argv[2]), threading.Event()
    run, channel = load(run_dir / "run.toml"), channel_to_parent()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))

    def listen() -> None:
        for message in messages(channel):
            if message["kind"] == "finish":
                break
        ending.set()

    threading.Thread(target=listen, name="argosy-parent", daemon=True).start()
    try:
        wait_for_port(ServerLayout(run).addresses[number], ending.is_set, Progress(enabled=True).say)
        is_over, is_saved = False, False
        if not ending.is_set():
            server = ParameterServer(run, run_dir, number, AGAIN in sys.argv)
            is_over, is_saved = server.serve(ending.is_set), not server.is_alone
            server.close()
    except ArgosyError as problem:
        with suppress(Gone):
            channel.send("failed", code=problem.exit_code, text=str(problem))
        sys.exit(problem.exit_code)
    with suppress(Gone):  # the command was killed: the state is saved nevertheless
        channel.send("done", finished=is_over, saved=is_saved)


if __name__ == "__main__":
    main()
