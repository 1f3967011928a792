"""What the coordinator says to agents that come, go silent, and come back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import run_folder
from argosy.checkpoint.fence import begin_generation, name_of, newest_generation
from argosy.config.launch import LaunchConfig
from argosy.config.schema import ResilienceConfig, RunConfig
from argosy.plan.plan import Plan
from argosy.processes.secret import call
from argosy.supervise import agent_connections, coordinator
from argosy.supervise.coordinator import Coordinator
from argosy.supervise.lease.lease import LeaseLost
from peers import SECRET, Peer
from waiting import PATIENT_S, wait_until

events = partial(run_folder.events, process="coordinator")


class AgentConnection:
    """The other end, by hand: a node of one worker."""

    def __init__(self, name: str, port: int, folder: str):
        self.name, self._folder = name, folder
        self._peer = Peer(socket.create_connection(("127.0.0.1", port)), call(SECRET))
        self.say, self.close = self._peer.say, self._peer.close

    def hello(self, workers: Sequence[dict[str, Any]] = (), **more: Any) -> AgentConnection:
        facts = {"host": "127.0.0.1", "slots": 1, "folder": self._folder, "workers": list(workers)}
        self.say("hello", name=self.name, **facts | more)
        return self

    def hears(self, kind: str) -> dict[str, Any]:
        """The next message of this kind; others are passed over."""
        while (message := self._peer.receive())["kind"] != kind:
            pass
        return message

    def keeps_talking_until(self, *kinds: str) -> dict[str, Any]:
        """It hears a message of one of these kinds."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self.say("heartbeat")
            if found := [message for message in self._peer.take() if message["kind"] in kinds]:
                return found[0]
            time.sleep(0.01)
        raise AssertionError(f"it heard of no {kinds}")

    def begins(self) -> AgentConnection:
        return self.hello().begins_worker()

    def begins_worker(self) -> AgentConnection:
        self.hears("start")
        self.say("started", slot=0, pid=1)
        self.say("ready", slot=0, generation=0, why="")
        return self


def in_generation(generation: int, rank: int) -> list[dict[str, Any]]:
    return [{"slot": 0, "state": "running", "rank": rank, "generation": generation, "pid": 1}]


class Sleep:
    """Makes a coordinator stand still, as SIGSTOP or a frozen machine does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(agent_connections, "LEASE_S", 0.5)
        monkeypatch.setattr(agent_connections, "LONGEST_TURN_S", 0.1)
        self._asleep, self._wake = threading.Event(), threading.Event()
        self._wants = False
        turn = agent_connections.AgentConnections.turn

        def turn_after_sleep(connections: agent_connections.AgentConnections, timeout_s: float) -> Any:
            self._turn()
            return turn(connections, timeout_s)

        monkeypatch.setattr(agent_connections.AgentConnections, "turn", turn_after_sleep)

    def _turn(self) -> None:
        if self._wants:
            self._wants = False
            self._asleep.set()
            self._wake.wait(10)

    def begin(self) -> None:
        self._wants = True
        assert self._asleep.wait(5)

    def end(self) -> None:
        time.sleep(1.0)  # twice the lease
        self._wake.set()


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Sleep:
    return Sleep(monkeypatch)


@pytest.fixture
def come(tmp_path: Path) -> Iterator[Callable[[str], AgentConnection]]:
    """A coordinator of a run of two processes, and agents that come to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    run = RunConfig(
        launch=LaunchConfig(nodes=2, coordinator="node0:29400"), resilience=ResilienceConfig(wait_for_nodes_s=600)
    )
    of = Coordinator(tmp_path, listener, run, Plan.parse("dp_replicate=2"), SECRET)
    thread = threading.Thread(target=of.run)
    agents: list[AgentConnection] = []

    def new(name: str) -> AgentConnection:
        agents.append(AgentConnection(name, listener.getsockname()[1], name_of(tmp_path)))
        return agents[-1]

    thread.start()
    yield new
    if thread.is_alive():
        last = new("last").hello(in_generation(newest_generation(tmp_path), 0))
        last.keeps_talking_until("heard")
        for agent in agents[:-1]:
            agent.close()
        last.keeps_talking_until("heard")
        last.say("stopping")
        last.keeps_talking_until("heard", "finish")
    for agent in agents:
        agent.close()
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def begun(come: Callable[[str], AgentConnection]) -> tuple[AgentConnection, AgentConnection]:
    """Two agents whose workers are in generation 1."""
    a, b = come("a").begins(), come("b").begins()
    a.say("store", generation=a.hears("open_store")["generation"], port=1)
    assert [agent.hears("join")["places"][0]["rank"] for agent in (a, b)] == [0, 1]
    return a, b


def test_every_heartbeat_is_answered(come):
    a = come("a").hello()
    a.say("heartbeat")
    assert a.hears("heard")


@pytest.mark.parametrize(
    ("nodes", "every_s", "most_steps"), [(2, 0.5, 64), (512, 0.5, 8), (2048, 2.0, 8), (100_000, 2.5, 1)]
)
def test_the_larger_the_run_the_less_often_agents_are_to_report_but_often_enough_for_the_lease(
    nodes, every_s, most_steps
):
    heard = coordinator.heartbeats_of(nodes, 8 * nodes, wants_all=False)
    assert (heard.every_s, heard.most_steps) == (every_s, most_steps)


def test_a_node_that_was_cut_off_is_told_that_its_generation_is_over(come, monkeypatch):
    a, _ = begun(come)
    monkeypatch.setattr(agent_connections, "LEASE_S", 0.3)
    assert "it sent nothing" in a.keeps_talking_until("break")["why"]
    assert come("b").hello(in_generation(1, rank=1)).hears("break")["generation"] == 1


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_node_that_had_the_first_rank_is_told_of_a_world_without_it(come, monkeypatch, is_cut_off):
    """Beside its workers it has what must be on one node only: sinks, a site's exchange."""
    a, b = begun(come)
    c = come("c").begins()
    if is_cut_off:
        monkeypatch.setattr(agent_connections, "LEASE_S", 1.0)
        a.close()
    else:
        a.say("lost", slot=0, why="signal SIGKILL")
    b.keeps_talking_until("break")
    b.say("ready", slot=0, generation=1, why="rank 0 is lost")
    c.keeps_talking_until("open_store")
    c.say("store", generation=2, port=1)
    assert c.hears("join")["places"][0]["rank"] == 0
    if is_cut_off:
        a = come("a").hello(in_generation(1, rank=0))
    told = a.hears("join")
    assert (told["generation"], told["places"]) == (2, [])


@pytest.mark.parametrize("is_open", [False, True])
def test_a_world_that_does_not_come_together_is_written_about(come, tmp_path, monkeypatch, is_open):
    monkeypatch.setattr(coordinator, "WAITS_S", 0.3)
    if is_open:
        begun(come)[0].say("heartbeat")
    else:
        for agent in [come("a").begins(), come("b").begins()][:1]:
            agent.hears("open_store")
    said = wait_until(lambda: events(tmp_path, "world_waits"))
    missing = (
        "not all workers have shown themselves of a, b" if is_open else "node a has not opened the rendezvous store"
    )
    assert [event["why"] for event in said] == [missing]


def test_a_world_whose_ranks_have_ended_is_not_taken_for_one_that_waits(come, tmp_path, monkeypatch):
    look, made, ended = Coordinator._write_what_is_missing, threading.Event(), threading.Event()

    def look_once_it_has_ended(of: Coordinator, now_s: float) -> None:
        if made.is_set():
            look(of, now_s + coordinator.WAITS_S)
            ended.set()

    monkeypatch.setattr(Coordinator, "_write_what_is_missing", look_once_it_has_ended)
    a, _ = begun(come)
    a.say("heartbeat", report={"generation": 1, "workers": [[0, 1]], "step": 1, "took": [[0, [0.1]]]})
    a.say("heartbeat", report={"generation": 1, "workers": []})
    a.hears("heard")
    a.keeps_talking_until("heard")
    made.set()
    assert ended.wait(PATIENT_S) and not events(tmp_path, "world_waits")


def test_a_coordinator_that_was_stopped_drops_nobody_when_it_wakes(sleep, come, tmp_path):
    """One agent has waited for its answer, the other has given its connection up and called again."""
    a, b = begun(come)
    sleep.begin()
    a.say("heartbeat")
    b.close()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(come, "b")
        sleep.end()
        again.result(10).hello(in_generation(1, rank=1)).hears("heard")
    assert a.keeps_talking_until("heard") and not events(tmp_path, "break") and not events(tmp_path, "agent_left")


def test_a_node_that_was_lost_while_the_coordinator_was_stopped_is_missed_soon_after(sleep, come, tmp_path):
    a, b = begun(come)
    sleep.begin()
    b.close()
    sleep.end()
    assert "node b is lost: the other end has closed" in a.keeps_talking_until("break")["why"]
    assert not events(tmp_path, "finish")


def test_an_agent_that_comes_back_after_the_end_is_told_of_it_and_none_that_leaves_then_is_lost(come, tmp_path):
    a, b = begun(come)
    for agent in (a, b):
        agent.say("done", slot=0)
    assert b.hears("finish")["exit_code"] == 0
    b.close()
    assert come("b").hello(in_generation(1, rank=1)).hears("finish")["exit_code"] == 0
    assert not events(tmp_path, "agent_left")


def test_a_node_that_comes_twice_is_there_once(come):
    """The connection that it gave up may still be open here, and say something in the same moment."""
    a, b = begun(come)
    for _ in range(20):
        b.say("heartbeat")
        again = come("b").hello(in_generation(1, rank=1))
        b.close()
        b = again
    b.say("heartbeat")
    assert b.hears("heard")
    b.say("lost", slot=0, why="signal SIGKILL", exit_code=-9)
    assert a.hears("break")["why"] == "rank 1 is lost: signal SIGKILL", "nothing before was taken for a loss"


def test_a_node_of_another_run_is_sent_away_and_disturbs_nobody(come):
    a, _ = begun(come)
    stray = come("a").hello(folder="another")
    finish = stray.hears("finish")
    assert finish["exit_code"] == 2 and "a port of its own" in finish["why"]
    stray.say("started", slot=0, pid=1)
    a.say("heartbeat")
    assert a.hears("heard")


def test_of_two_machines_of_one_name_the_one_that_came_later_is_told_and_the_other_goes_on(come):
    first = come("a").hello(process="first")
    later = come("a").hello(process="later")
    first.close()  # its connection has ended, as that of `later` will
    first = come("a").hello(process="first")
    first.hears("heard")
    later.close()
    finish = come("a").hello(process="later").hears("finish")
    assert finish["exit_code"] == 2 and "launch.node" in finish["why"] and "called a" in finish["why"]
    first.say("heartbeat")
    assert first.hears("heard")


def test_an_agent_that_comes_back_long_after_another_has_taken_its_place_is_sent_away(come, monkeypatch):
    """It was stopped, or its machine frozen."""
    come("a").hello(process="first").hears("heard")
    later = come("a").hello(process="later")
    later.hears("heard")
    monkeypatch.setattr(coordinator, "LEASE_S", 0.0)
    for _ in range(2):
        assert "launch.node" in come("a").hello(process="first").hears("finish")["why"]
    later.say("heartbeat")
    assert later.hears("heard")


def test_an_agent_that_was_started_again_and_again_is_taken_for_its_node_each_time(come):
    for process in ("one", "two", "three", "three", "four"):
        come("a").hello(process=process).hears("heard")


def test_only_the_node_that_was_asked_to_opens_the_store(come, tmp_path):
    a, b = come("a").begins(), come("b").begins()
    generation = a.hears("open_store")["generation"]
    b.say("store", generation=generation, port=2)
    b.say("heartbeat")
    b.hears("heard")
    a.say("store", generation=generation, port=1)
    assert [agent.hears("join")["port"] for agent in (a, b)] == [1, 1]


def test_a_coordinator_whose_run_was_taken_over_begins_nothing(come, tmp_path):
    """Somebody has started another elsewhere: there is one that begins generations."""
    begin_generation(tmp_path, 7)
    a, _ = come("a").begins(), come("b").begins()
    finish = a.hears("finish")
    assert finish["exit_code"] == 75 and "generation 7" in finish["why"] and newest_generation(tmp_path) == 7


# ---- nodes that are checked --------------------------------------------------------------------------------------

WELL = {"wrong": [], "rates": {"core memory": 5e9}, "seconds": 0.5, "unknown": ""}
EVIDENCE = {"device": "core 1", "test": "memory", "problem": "0x1, not 0x0, at byte 8 (address)", "times": 1, "of": 4}


def test_no_world_is_formed_before_all_nodes_are_checked(come, tmp_path):
    a, b = come("a"), come("b")
    for agent in (a, b):
        agent.hello(is_checking=True).begins_worker()
    a.say("node_checked", health=WELL)
    a.say("heartbeat")
    assert a.hears("heard") and not events(tmp_path, "generation")
    b.say("node_checked", health=WELL)
    assert a.hears("open_store")["generation"] == 1


def test_a_node_that_fails_its_check_is_sent_away_with_the_evidence(come, tmp_path):
    a, b = come("a").begins(), come("b").hello(is_checking=True)
    b.say("node_checked", health={**WELL, "wrong": [EVIDENCE]})
    finish = b.hears("finish")
    assert finish["exit_code"] == 69 and finish["error"] == "UnfitNode"
    assert "b computes wrong results: core 1, memory: 0x1, not 0x0" in finish["why"]
    (refused,) = events(tmp_path, "node_refused")
    assert refused["node"] == "b" and refused["evidence"] == [EVIDENCE]
    come("c").begins()
    assert a.hears("open_store"), "another takes its place"


def test_a_node_that_is_slower_than_the_others_is_told_of_once(come, tmp_path):
    a, _ = come("a").hello(health=WELL), come("b").hello(health=WELL)
    for _ in range(2):
        come("c").hello(health={**WELL, "rates": {"core memory": 2e9}}).hears("start")
    (event,) = events(tmp_path, "node_slow")
    assert event["node"] == "c" and "core memory" in event["why"]
    assert a.hears("start")


def test_the_coordinator_of_one_agent_ends_with_it(tmp_path):
    """The same command again begins one of its own, which may need the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        of = Coordinator(tmp_path, listener, RunConfig(), Plan.parse("dp_replicate=2"), SECRET)
        thread = threading.Thread(target=of.run)
        thread.start()
        agent = AgentConnection("a", listener.getsockname()[1], name_of(tmp_path)).hello()
        assert agent.hears("start")
        agent.close()
        thread.join(2)
    assert not thread.is_alive()


# ---- a coordinator whose place is a lease --------------------------------------------------------------------------


class Held:
    """The lease, as the test says."""

    def __init__(self) -> None:
        self.is_held, self.problem, self.checked = True, "", list[int]()
        self.raises: LeaseLost | None = None

    def check(self, generation: int) -> None:
        self.checked.append(generation)
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def leased(tmp_path: Path) -> Iterator[tuple[Held, Callable[[str], AgentConnection], threading.Thread]]:
    """A lease, agents that come to the coordinator that holds it, and the thread that this runs in."""
    run = RunConfig(launch=LaunchConfig(nodes=2, lease="folder"), resilience=ResilienceConfig(wait_for_nodes_s=600))
    held, made = Held(), list[AgentConnection]()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plan = Plan.parse("dp_replicate=2")
        of = Coordinator(tmp_path, listener, run, plan, SECRET, owner="a", lease=held)  # type: ignore[arg-type]
        thread = threading.Thread(target=of.run)
        thread.start()

        def come(name: str) -> AgentConnection:
            made.append(AgentConnection(name, listener.getsockname()[1], name_of(tmp_path)))
            return made[-1]

        yield held, come, thread
        held.is_held = False
        thread.join(10)
        for agent in made:
            agent.close()
    assert not thread.is_alive()


def test_a_generation_begins_only_while_the_lease_is_held(leased, tmp_path):
    held, come, thread = leased
    held.raises = LeaseLost("another has it")
    come("a").begins(), come("b").begins()
    thread.join(10)
    assert not thread.is_alive() and held.checked == [1] and newest_generation(tmp_path) == 0
    assert [e["why"] for e in events(tmp_path, "lease_lost")] == ["another has it"]


def test_a_coordinator_without_its_lease_orders_nothing_any_more_and_the_run_goes_on(leased, tmp_path):
    held, come, thread = leased
    come("a").begins()
    held.is_held = False
    thread.join(10)
    assert not thread.is_alive() and not events(tmp_path, "generation")
    assert events(tmp_path, "lease_lost") and not events(tmp_path, "finish")


def test_a_generation_that_another_has_just_begun_is_not_begun_and_does_not_end_the_run(leased, tmp_path):
    """By one that stood still after it was told that it has the lease: the next coordinator goes on after that."""
    held, come, thread = leased
    begin_generation(tmp_path, 1, "b")
    come("a").begins(), come("b").begins()
    thread.join(10)
    assert not thread.is_alive() and held.checked == [1] and not events(tmp_path, "finish")
    assert "generation 1 of" in events(tmp_path, "lease_lost")[0]["why"] and not events(tmp_path, "generation")


def test_a_coordinator_whose_agents_all_leave_when_the_run_stops_ends_at_once(leased, tmp_path):
    """The same command again must not come to one that starts nothing any more."""
    held, come, thread = leased
    a = come("a").begins()
    a.say("stopping")
    assert a.hears("finish")["exit_code"] == 0
    a.close()
    thread.join(5)
    assert not thread.is_alive() and held.is_held


def test_a_spare_node_that_is_asked_to_stop_is_let_go(come, tmp_path):
    begun(come)
    spare = come("c").begins()
    spare.say("stopping")
    assert spare.hears("finish")["exit_code"] == 0 and not events(tmp_path, "finish")
