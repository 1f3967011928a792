"""A worker process: it joins one world after another, as its agent says, and trains its part of the run in each."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError

from argosy.checkpoint.fence import GENERATION_VARIABLE
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.credentials import redact
from argosy.errors import FINAL_BIT, ArgosyError
from argosy.observe.collectives import sequence_numbers
from argosy.observe.heartbeat import UNREAD, Heartbeat
from argosy.observe.stacks import write_when_asked
from argosy.observe.terminal import lasting_output
from argosy.parallel.world import Connections, World, WorldSeat, join_world, leave_world
from argosy.plan.plan import Plan
from argosy.processes.child import Channel, ChannelClosed, Message, channel_to_parent
from argosy.processes.connection import raise_limit
from argosy.training.loop import train
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal

CLOSE_EVERY_S = 0.2
"""Time between two closings of a broken world's connections, until the process has left it."""
LOCAL_FAULTS = ("Too many open files", "Cannot allocate memory", "No space left on device")
"""Words of errors that gloo reports too, but another world would only meet again: this process must be replaced."""
GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "TCPStore", "store")
"""Words of the RuntimeErrors with which gloo and the store report that a peer is gone."""


class AgentClient:
    """The worker's client of its agent; a thread listens to it."""

    def __init__(self, channel: Channel, stop: StopSignal):
        self._channel, self._stop = channel, stop
        self._worlds: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._connections = Connections()
        self._generation, self._changes = 0, threading.Lock()
        self._broken = threading.Event()
        self._why = ""
        threading.Thread(target=self._listen, name="argosy-agent", daemon=True).start()

    def worlds(self) -> Iterator[Message]:
        """Yield the worlds to join, one after the other."""
        while True:
            yield self._worlds.get()

    def is_broken(self) -> bool:
        """Return True once the agent has said that the current world is over."""
        return self._broken.is_set()

    def say(self, kind: str, **facts: Any) -> None:
        """Send the agent a message. Without an agent, end this process."""
        try:
            self._channel.send(kind, **facts)
        except ChannelClosed:
            os._exit(1)

    def left(self, why: str) -> None:
        """Tell the agent that the world is left and the process is ready for another."""
        with self._changes:  # `_break` must not close the next world's connections for this one's
            generation, self._generation = self._generation, 0
        self.say("ready", generation=generation, why=self._why if self._broken.is_set() else why)

    def _listen(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed:
                os._exit(1)  # the agent is gone, and an orphan must not train on
            if message["kind"] == "join":
                # Not once the main thread takes it: the next message may break this world off already.
                self._connections.close()
                self._broken.clear()
                self._stop.world_is_over = self._stop.is_to_hold = False
                self._generation = message["generation"]
                self._worlds.put(message)
            elif message["kind"] == "hold" and message["generation"] == self._generation:
                self._stop.is_to_save = message["on_disk"]
                self._stop.is_to_hold = True
            elif message["kind"] == "break" and message["generation"] == self._generation:
                self._why = message["why"]
                self._broken.set()
                self._stop.world_is_over = True
                threading.Thread(target=self._break, args=(self._generation,), daemon=True).start()

    def _break(self, generation: int) -> None:
        """End what the main thread waits for in this world, or may still begin to wait for."""
        while True:
            with self._changes:
                if self._generation != generation:
                    return
                self._connections.break_off()
            time.sleep(CLOSE_EVERY_S)


def work(
    run: RunConfig, plan: Plan, world: World, run_dir: Path, stop: StopSignal, survivor: Survivor | None = None,
    heartbeat: Heartbeat = UNREAD,
) -> bool:  # fmt: skip
    """Train in an existing world, and leave it. Return True if the run's last step is made."""
    try:
        return train(run, plan, world, run_dir, stop, survivor or Survivor(), heartbeat)
    finally:
        leave_world()


def main() -> None:
    """Train in the worlds that the agent names, until the run has ended. Entry of the agent's forked processes.

    Errors are sent to the agent, which knows which process failed first and reports that error to the user.
    """
    # When a collective on GPUs fails or times out, torch's watchdog would end the process, and the state that survives
    # in it. Here the agent breaks the world off and aborts it (`parallel.world`), which torch asks to be done
    # with this turned off (the notes of distributed_c10d._abort_process_group). The user's own setting comes first.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    raise_limit()  # strangers can open connections to gloo's listeners, each of which keeps a descriptor here
    run_dir, stop = Path(os.environ["ARGOSY_RUN_DIR"]), StopSignal().listen()
    agent = AgentClient(channel_to_parent(), stop)
    log = run_dir / "logs" / f"worker-{os.environ['ARGOSY_NODE']}-{os.environ['ARGOSY_SLOT']}.log"
    with lasting_output(log):
        _serve(run_dir, stop, agent, _to_log(log))


def _serve(run_dir: Path, stop: StopSignal, agent: AgentClient, terminal: tuple[int, int]) -> None:
    """Train in one world after the other. terminal: the descriptors to which rank 0 prints."""
    try:
        heartbeat = Heartbeat(Path(os.environ["ARGOSY_SCRATCH"]))
    except OSError as error:
        _fail(agent, error)
    survivor = Survivor()
    agent.left("")
    for message in agent.worlds():
        _speak(terminal, message)
        try:
            finished = _train_in(message, run_dir, stop, survivor, heartbeat)
        except Exception as error:
            why = str(error)
            if agent.is_broken() or is_of_a_connection(error):
                traceback.clear_frames(error.__traceback__)  # they hold the trainer, and the trainer its process groups
            else:
                _fail(agent, error)
        else:
            agent.say("done", finished=finished)
            return
        leave_world()
        heartbeat.enter("waiting")
        agent.left(why)


def _train_in(message: Message, run_dir: Path, stop: StopSignal, survivor: Survivor, heartbeat: Heartbeat) -> bool:
    place = WorldSeat(**{field.name: message[field.name] for field in fields(WorldSeat)})
    os.environ |= {**place.environment(), GENERATION_VARIABLE: str(message["generation"])}
    run, plan = load(run_dir / "run.toml"), Plan.parse(message["plan"])
    heartbeat.join(message["generation"], message["rank"], sequence_numbers)
    return work(run, plan, join_world(run.launch), run_dir, stop, survivor, heartbeat)


def is_of_a_connection(error: Exception) -> bool:
    """Return True if a collective raised it because a peer is gone; False if something went wrong here."""
    text = str(error)
    is_told_so = isinstance(error, DistError) or (isinstance(error, RuntimeError) and any(w in text for w in GLOO))
    return is_told_so and not any(word in text for word in LOCAL_FAULTS)


def _fail(agent: AgentClient, error: Exception) -> NoReturn:
    code = FINAL_BIT + error.exit_code if isinstance(error, ArgosyError) else 1
    text, trace = redact(str(error)), redact(traceback.format_exc())
    agent.say("failed", error=type(error).__name__, text=text, traceback=trace)
    sys.exit(code)


def _to_log(path: Path) -> tuple[int, int]:
    """Redirect what this process prints, and the stack that its agent asks for, to a file of the run's logs.

    Returns descriptors of the terminal.
    """
    terminal = os.dup(1), os.dup(2)
    with suppress(OSError):  # the disk takes nothing: print to the terminal
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
    write_when_asked(2)
    return terminal


def _speak(terminal: tuple[int, int], message: Message) -> None:
    """Let rank 0 print to the terminal."""
    if message["rank"] == 0 and os.environ["ARGOSY_QUIET"] == "0":
        sys.stdout.flush()
        for descriptor, original in zip((1, 2), terminal, strict=True):
            os.dup2(original, descriptor)
