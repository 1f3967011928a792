"""Agents that agree through a lease on which of them starts the coordinator."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from argosy.config.dump import save_run
from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.observe.events import Events, read_lines
from argosy.plan.plan import Plan
from argosy.processes.connection import Address
from argosy.supervise import coordinator_client
from argosy.supervise import place as place_module
from argosy.supervise.lease import lease as lease_module
from argosy.supervise.lease.lease import Holder, LeaseUnreachable
from argosy.supervise.place import LeasedPlace, check_coordinator, check_place, own_address, place_of
from waiting import wait_until

LAUNCH = LaunchConfig(nodes=2, lease="folder", address="127.0.0.1")


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LeasedPlace]]:
    """The place, as agents of one run see it."""
    monkeypatch.setattr(coordinator_client, "STARTS_APART_S", 0.1)
    save_run(RunConfig(launch=LAUNCH), tmp_path / "run.toml")
    made: list[LeasedPlace] = []

    def agent(name: str) -> LeasedPlace:
        place = place_of(tmp_path, LAUNCH, Plan.parse("dp_replicate=2"), Events(tmp_path, name))
        assert isinstance(place, LeasedPlace)
        made.append(place)
        return place

    yield agent
    for place in made:
        place.process.kill()
        place.process.close()


def found(place: LeasedPlace) -> Address:
    """Its address, once it is known."""
    return wait_until(lambda: place.address(time.monotonic()))


def test_one_agent_starts_the_coordinator_and_the_others_find_it(agents, tmp_path):
    a, b = agents("a"), agents("b")
    address = found(a)
    assert a.process.is_alive and a.process.address == address
    assert found(b) == address and not b.process.has_ended and not b.process.is_alive
    assert not any(place.has_moved(time.monotonic(), address, silent_s=60.0) for place in (a, b))


def test_a_coordinator_that_dies_is_started_again_by_its_agent_at_once(agents, tmp_path):
    a, b = agents("a"), agents("b")
    address = found(a)
    a.process.kill()
    began_s = time.monotonic()
    assert found(a) == address and a.process.is_alive
    assert time.monotonic() - began_s < lease_module.TTL_S, "its agent knows that it is dead"
    assert found(b) == address
    assert [e["replaces"] for e in read_lines(tmp_path / "events/a.jsonl")] == [False, True]


def test_an_agent_that_cannot_start_a_coordinator_lets_another_have_the_lease(agents, monkeypatch, tmp_path):
    monkeypatch.setattr(place_module, "TTL_S", 1.0)
    monkeypatch.setattr(lease_module, "TTL_S", 1.0)
    (tmp_path / "logs").write_text("")  # no folder can be made there
    a, b = agents("a"), agents("b")
    wait_until(lambda: a.address(time.monotonic()) or a.problem)
    assert "cannot be started" in a.problem and b.lease.holder()
    (tmp_path / "logs").unlink()
    wait_until(lambda: [place.address(time.monotonic()) for place in (a, b)] and b.process.is_alive)
    assert found(a) == b.process.address and not a.process.is_alive


def test_the_lease_is_kept_for_a_coordinator_that_starts_for_longer_than_it_lasts(agents, monkeypatch):
    a, renewed = agents("a"), list[int]()
    address = found(a)
    monkeypatch.setattr(a.lease, "renew", lambda: renewed.append(a.process.address[1]))

    wait_until(lambda: a.has_moved(time.monotonic(), address, silent_s=4.0) or renewed)
    assert renewed[0] == address[1] and a.process.is_starting
    a.process.heard()
    assert not a.process.is_starting, "from now on it renews it by itself"


def test_a_lease_that_ends_is_taken_by_another_agent(agents, monkeypatch):
    a, b = agents("a"), agents("b")
    address = found(a)
    assert found(b) == address
    a.process.kill()  # and its agent with it: nobody asks a any more
    monkeypatch.setattr(lease_module, "TTL_S", 1.0)
    assert not b.has_moved(time.monotonic(), address, silent_s=1.0), "so short a silence proves nothing"
    wait_until(lambda: b.has_moved(time.monotonic(), address, silent_s=60.0))
    wait_until(lambda: b.address(time.monotonic()) and b.process.is_alive)
    assert found(b) == b.process.address != address


def test_a_look_at_the_lease_says_nothing_of_a_later_coordinator(agents, monkeypatch):
    place, first, second = agents("a"), Holder("first", "127.0.0.1", 1), Holder("second", "127.0.0.1", 2)
    goes_on, others = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(place.lease, "holder", lambda: first if goes_on.wait() else None)
    assert not place.has_moved(time.monotonic(), first.address, silent_s=60.0)
    goes_on.set()
    wait_until(lambda: all(t.name != "argosy-lease" for t in threading.enumerate() if t not in others))
    monkeypatch.setattr(place.lease, "holder", lambda: second)
    for silent_s in (0.1, 60.0, 60.0):
        assert not place.has_moved(time.monotonic(), second.address, silent_s)


def test_a_coordinator_that_has_lost_the_lease_and_does_not_end_is_killed(agents):
    a, b = agents("a"), agents("b")
    found(a)
    a.lease.release()
    assert found(b) == b.process.address
    assert found(a) == b.process.address and a.process.has_ended


def test_while_the_backend_does_not_answer_the_problem_is_known_and_nothing_is_done(agents, monkeypatch):
    a = agents("a")

    def silent() -> Holder | None:
        raise LeaseUnreachable("etcd does not answer")

    monkeypatch.setattr(a.lease, "holder", silent)
    wait_until(lambda: a.address(time.monotonic()) or a.problem)
    assert a.problem == "etcd does not answer" and a.process.address is None
    assert not a.has_moved(time.monotonic(), ("127.0.0.1", 1), silent_s=60.0)
    monkeypatch.undo()
    assert found(a) == a.process.address


def test_without_a_thread_to_look_in_the_lease_is_looked_at_again(agents, monkeypatch):
    a = agents("a")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert a.address(time.monotonic()) is None and a.problem == "can't start new thread"


def test_an_answer_that_nobody_expects_is_an_error_and_no_silence(agents, monkeypatch):
    a = agents("a")

    def wrong() -> Holder | None:
        raise KeyError("spec")

    monkeypatch.setattr(a.lease, "holder", wrong)
    with pytest.raises(KeyError, match="spec"):
        found(a)


def test_an_address_that_is_not_this_machine_s_is_the_user_s_to_change(tmp_path):
    launch = LaunchConfig(nodes=2, lease="folder", address="192.0.2.1", port=4000)
    place = place_of(tmp_path, launch, Plan(), Events(tmp_path, "a"))
    with pytest.raises(UserError, match=r"launch\.address = 192\.0\.2\.1, launch\.port = 4000: .*cannot listen there"):
        found(place)  # type: ignore[arg-type]


@pytest.mark.parametrize(("package", "lease"), [("etcd3gw", "etcd://h"), ("kubernetes", "kubernetes://n/x")])
def test_a_client_that_is_not_installed_is_named_before_anything_is_written(monkeypatch, package, lease):
    for name in (package, f"{package}.client"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UserError, match=rf"pip install 'argosy\[{lease.partition(':')[0]}\]'"):
        check_place(LaunchConfig(lease=lease, address="127.0.0.1"))


NAMES = {"node0": "127.0.1.1", "localhost": "127.0.0.1", "node1": "10.0.0.7"}


@pytest.fixture(autouse=True)
def resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as Debian's /etc/hosts has them on the machine node0."""

    def resolved(name: str) -> str:
        if name not in NAMES:
            raise socket.gaierror
        return NAMES[name]

    monkeypatch.setattr(socket, "gethostbyname", resolved)
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")


@pytest.mark.parametrize("name", ["node0", "localhost"])
def test_a_coordinator_s_name_that_is_loopback_is_refused_with_several_nodes(name):
    with pytest.raises(UserError) as refused:
        check_coordinator(LaunchConfig(nodes=2, coordinator=f"{name}:29400"))
    text = str(refused.value)
    assert f"launch.coordinator = {name}:29400: {name} resolves to {NAMES[name]} on this machine" in text
    assert "127.0.0.1:29400 if all agents run on this machine" in text


@pytest.mark.parametrize(
    ("nodes", "coordinator"),
    [(1, "node0:1"), (2, "127.0.0.1:1"), (2, "node1:1"), (2, "unknown:1"), (2, "10.0.0.7:1"), (2, "")],
)
def test_what_others_can_reach_or_is_meant_so_is_taken(nodes, coordinator):
    check_coordinator(LaunchConfig(nodes=nodes, coordinator=coordinator))


def test_this_machine_s_address_is_the_given_one():
    launch = LaunchConfig(nodes=2, lease="folder", address="127.0.0.1")
    assert own_address(launch) == "127.0.0.1"


def test_a_host_name_that_is_loopback_is_refused_where_the_others_would_be_told_of_it():
    with pytest.raises(UserError, match=r"name node0 resolves to 127\.0\.1\.1.*Give launch\.address"):
        own_address(LaunchConfig(nodes=2, lease="folder"))
    assert own_address(LaunchConfig(nodes=1, lease="folder")) == "127.0.1.1"


def test_the_address_towards_etcd_is_preferred_unless_that_is_on_this_machine(monkeypatch):
    monkeypatch.setitem(NAMES, "node0", "10.0.0.9")
    assert own_address(LaunchConfig(nodes=2, lease="etcd://127.0.0.1:2379")) == "10.0.0.9"

    class Unconnected(socket.socket):
        def connect(self, address: object) -> None:
            pass

        def getsockname(self) -> tuple[str, int]:
            return ("10.0.0.5", 40000)

    monkeypatch.setattr(socket, "socket", Unconnected)
    assert own_address(LaunchConfig(nodes=2, lease="etcd://10.0.0.8:2379")) == "10.0.0.5"


def test_srun_s_machine_tells_which_of_this_one_s_addresses_the_others_reach(monkeypatch):
    monkeypatch.setitem(NAMES, "node0", "127.0.1.1")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "192.0.2.7")
    monkeypatch.setattr(place_module, "address_towards", {("192.0.2.7", 9): "10.0.0.5"}.get)
    assert own_address(LaunchConfig(nodes=2, lease="folder")) == "10.0.0.5"


CODE = """
import resource
from argosy.processes.connection import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
raise_limit()
files = [open("/dev/null") for _ in range(100)]
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_it_goes():
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert said == "(256, 256)\n"
