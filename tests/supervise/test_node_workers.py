"""A node's workers: what becomes of each is told to the coordinator, and one that hangs or is late is killed."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from argosy.config.launch import LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.errors import FINAL_BIT
from argosy.observe.events import Events, read_lines
from argosy.observe.heartbeat import Heartbeat, read_heartbeat
from argosy.observe.node_metrics import lines_of_node
from argosy.processes.child import Channel, ChannelClosed, ForkEntry, Message
from argosy.supervise import messages as say
from argosy.supervise import node_workers as module
from argosy.supervise.node_workers import NodeWorkers
from argosy.supervise.nodes import RankState, WorkerProcess
from argosy.supervise.stopping import Stopping


class Forks:
    """A fork server whose processes do nothing: the test speaks for them over `ends`."""

    has_forked = True
    pid = os.getpid()

    def __init__(self) -> None:
        self.ends: dict[str, Channel] = {}
        self.environments: dict[str, Mapping[str, str]] = {}

    def fork(self, key: str, entry: ForkEntry, environment: Mapping[str, str], *, at_once: bool = False) -> Channel:
        ours, theirs = socket.socketpair()
        self.ends[key], self.environments[key] = Channel(theirs), environment
        return Channel(ours)


class Node:
    """The workers of a node, with the messages that the coordinator gets."""

    def __init__(self, folder: Path):
        self.folder, self.forks, self.told = folder, Forks(), list[say.FromAgent]()
        run = RunConfig(launch=LaunchConfig(device="cpu"), resilience=ResilienceConfig(heartbeat_timeout_s=0.2))
        self.stopping = Stopping(folder, grace_s=30.0)
        events = Events(folder, "agent")
        self.workers = NodeWorkers(folder, run, "a", self.forks, self.stopping, events, self.told.append)  # type: ignore[arg-type]
        self.selector, self.processes = selectors.DefaultSelector(), dict[int, subprocess.Popen[bytes]]()
        self.workers.open(self.selector, folder, world_size=2)

    def start(self, slot: int) -> subprocess.Popen[bytes]:
        """Start a worker, whose process sleeps, and have it be ready."""
        self.workers.start(slot, "")
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # by which workers are asked for their stacks
        self.processes[slot] = process = subprocess.Popen(["sleep", "600"])
        signal.signal(signal.SIGUSR2, before)
        self.workers.forked(slot, process.pid)
        self.says(slot, "ready", generation=0, why="")
        return process

    def says(self, slot: int, kind: str, **facts: Any) -> None:
        self.forks.ends[f"worker {slot}"].send(kind, **facts)
        for key, _ in self.selector.select(1.0):
            key.data()

    def hears(self, slot: int) -> list[Message]:
        return self.forks.ends[f"worker {slot}"].take()

    def join(self, generation: int = 1) -> None:
        places = tuple(say.WorldPlace(slot=slot, rank=slot, local_rank=slot) for slot in self.processes)
        world = say.JoinWorld(generation=generation, size=2, plan="dp_replicate=2", host="127.0.0.1", places=places)
        self.workers.join(world, "a file")

    def ends(self, slot: int) -> int:
        """Take in how the process ended."""
        process = self.processes.pop(slot)
        code = process.wait(30)
        self.workers.ended(process.pid, code)
        return code

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.folder / "events/agent.jsonl") if event["event"] == kind]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()
    made.selector.close()


def test_a_worker_that_is_killed_is_lost_with_its_signal(node, capsys):
    process = node.start(0)
    assert [message.kind for message in node.told] == ["started", "ready"]
    assert node.forks.environments["worker 0"]["ARGOSY_SLOT"] == "0"
    node.join()
    (joined,) = node.hears(0)
    assert (joined["kind"], joined["rank"], joined["local_size"], joined["file"]) == ("join", 0, 1, "a file")
    assert node.workers.states == {RankState.RUNNING} and node.workers.generation == 1
    process.kill()
    node.ends(0)
    lost = node.told[-1]
    assert isinstance(lost, say.WorkerLost) and (lost.why, lost.exit_code) == ("signal SIGKILL", -signal.SIGKILL)
    assert node.events("worker_died")[0]["generation"] == 1 and len(node.workers) == 0
    assert "worker 0" in capsys.readouterr().err


def test_what_was_done_in_a_world_is_written_before_the_next(node):
    with pytest.MonkeyPatch.context() as patch, closing(Heartbeat(node.folder)) as heartbeat:
        patch.setattr(WorkerProcess, "reading", lambda worker, folder: read_heartbeat(heartbeat.path))
        node.start(0)
        node.join(1)
        heartbeat.join(1, 0, dict)
        heartbeat.begin(0)
        heartbeat.took(0.1, {"step": 0.1}, {}, 1000, 1)
        node.join(2)
    (line,) = read_lines(lines_of_node(node.folder, "a"))
    assert (line["generation"], line["steps"]) == (1, [0, 0])


def test_a_worker_that_is_done_is_not_lost(node):
    process = node.start(0)
    node.join()
    node.says(0, "done", finished=True)
    assert node.told[-1] == say.WorkerDone(slot=0) and node.workers.states == {RankState.DONE}
    process.send_signal(signal.SIGKILL)
    process.wait()
    node.workers.ended(process.pid, 0)
    assert len(node.workers) == 0 and node.told[-1] == say.WorkerDone(slot=0)
    (known,) = node.workers.known()  # as a coordinator is told that is reached again
    assert (known.state, known.rank, known.generation) == (RankState.DONE, 0, 1)
    node.workers.start(0, "")
    assert [worker.state for worker in node.workers.known()] == [RankState.STARTING]


def test_a_worker_that_is_done_and_does_not_end_is_killed_and_nothing_is_lost(node, monkeypatch):
    monkeypatch.setattr(module, "EXIT_S", 0.0)
    node.start(0).send_signal(signal.SIGSTOP)
    node.join()
    node.stopping.ask(signal.SIGTERM)
    assert node.stopping.begins()
    node.says(0, "done", finished=True)
    node.workers.keep(time.monotonic() + 1.0, is_owed=False)
    assert node.ends(0) == -signal.SIGKILL
    assert len(node.workers) == 0 and node.told[-1] == say.WorkerDone(slot=0)
    assert not node.events("worker_died") and not node.stopping.not_saved


def test_a_worker_that_is_done_gives_way_to_another_before_it_has_ended(node):
    process = node.start(0)
    node.join()
    node.says(0, "done", finished=True)
    end = node.forks.ends["worker 0"]
    end.take()
    node.workers.start(0, "")
    with pytest.raises(ChannelClosed):
        end.take()
    process.kill()
    node.ends(0)
    assert node.workers.states == {RankState.STARTING} and node.told[-1] == say.WorkerDone(slot=0)


def test_an_error_that_a_restart_would_only_meet_again_is_told_in_the_worker_s_words(node):
    process = node.start(0)
    node.says(0, "failed", error="UserError", text="no such data", traceback="")
    process.kill()
    process.wait()
    node.workers.ended(process.pid, FINAL_BIT + 2)
    lost = node.told[-1]
    assert isinstance(lost, say.WorkerLost) and (lost.why, lost.error) == ("no such data", "UserError")
    assert not node.events("worker_died"), "the user gets one message: the run's"


def test_one_that_does_not_leave_a_broken_world_is_killed(node, monkeypatch):
    monkeypatch.setattr(module, "BREAK_S", 0.0)
    node.start(0)
    node.join()
    node.workers.leave(1, "node b is lost")
    assert [message["kind"] for message in node.hears(0)] == ["join", "break"]
    node.workers.keep(time.monotonic() + 1.0, is_owed=False)
    assert node.ends(0) == -signal.SIGKILL
    lost = node.told[-1]
    assert isinstance(lost, say.WorkerLost) and lost.why.startswith("it did not leave a broken world")


def test_one_that_left_is_not_killed_for_that(node, monkeypatch):
    monkeypatch.setattr(module, "BREAK_S", 0.0)
    node.start(0)
    node.join()
    node.workers.leave(1, "node b is lost")
    node.says(0, "ready", generation=1, why="node b is lost")
    node.workers.keep(time.monotonic() + 1.0, is_owed=False)
    assert node.processes[0].poll() is None and node.workers.states == {RankState.READY}


def test_only_members_of_the_generation_are_told_to_hold_and_killed(node):
    node.start(0)
    node.join()
    node.start(1)
    node.workers.hold(1, on_disk=True)
    assert [message["kind"] for message in node.hears(0)] == ["join", "hold"] and node.hears(1) == []
    node.workers.kill(1, 1, "it hangs")
    node.workers.kill(0, 2, "it hangs")
    assert node.processes[0].poll() is None and node.processes[1].poll() is None
    node.workers.kill(0, 1, "it hangs")
    assert node.ends(0) == -signal.SIGKILL
    lost = node.told[-1]
    assert isinstance(lost, say.WorkerLost) and lost.why == "it hangs"


def test_one_that_was_stopped_before_it_is_in_a_world_is_killed(node, monkeypatch):
    monkeypatch.setattr(module, "NEWCOMERS_EVERY_S", 0.0)
    node.start(0)
    os.kill(node.processes[0].pid, signal.SIGSTOP)
    now_s = time.monotonic()
    while node.processes[0].poll() is None:
        now_s += 0.5
        node.workers.keep(now_s, is_owed=False)
    assert node.ends(0) == -signal.SIGKILL and node.events("killed")


def test_the_end_of_a_run_leaves_no_worker_of_which_nothing_is_to_be_saved(node):
    node.start(0)
    node.join()
    node.start(1)
    node.stopping.begin(signal.SIGTERM)
    node.workers.stop()
    assert node.ends(1) == -signal.SIGKILL, "it was in no world"
    assert node.ends(0) == -signal.SIGTERM, "it is asked to save"


def test_a_run_that_stops_waits_for_no_worker_that_is_not_forked_yet(node):
    node.workers.start(0, "")
    node.stopping.begin(signal.SIGTERM)
    node.workers.stop()
    node.workers.start(1, "")  # the coordinator had not heard of the signal
    assert len(node.workers) == 0 and list(node.forks.ends) == ["worker 0"]
    node.workers.forked(0, os.getpid())
    with pytest.raises(ChannelClosed):
        node.hears(0)
    assert not node.told and not node.events("worker_started")


def test_workers_that_could_save_nothing_are_not_waited_for(node):
    node.start(0)
    node.join()
    node.stopping.begin(signal.SIGTERM)
    node.stopping.is_at_once = True
    node.workers.stop()
    assert node.ends(0) == -signal.SIGKILL and not node.stopping.not_saved


def test_a_dead_fork_server_takes_all_its_workers_with_it(node):
    node.start(0)
    node.workers.start(1, "")  # asked for, and never forked
    node.workers.lose_all()
    assert len(node.workers) == 0
    lost = [message.slot for message in node.told if isinstance(message, say.WorkerLost)]
    assert lost == [0, 1] and node.processes[0].wait(30) == -signal.SIGKILL
    with pytest.raises(ChannelClosed):
        node.hears(0)
