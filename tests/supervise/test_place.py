"""Agents that agree through a lease on which of them starts the coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from argosy.config.dump import save_run
from argosy.config.schema import LaunchConfig, RunConfig
from argosy.errors import UserError
from argosy.observe.events import Events, read_lines
from argosy.plan.plan import Plan
from argosy.processes.connection import Address
from argosy.supervise.lease import lease as lease_module
from argosy.supervise.lease.lease import Holder, LeaseUnreachable
from argosy.supervise.place import LeasedPlace, check_place, place_of
from waiting import wait_until

LAUNCH = LaunchConfig(nodes=2, lease="folder", address="127.0.0.1")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[[str], LeasedPlace]]:
    """The place, as agents of one run see it."""
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


def test_a_coordinator_that_has_lost_the_lease_and_does_not_end_is_killed(agents):
    a, b = agents("a"), agents("b")
    found(a)
    a._lease.release()
    assert found(b) == b.process.address
    assert found(a) == b.process.address and a.process.has_ended


def test_while_the_backend_does_not_answer_the_problem_is_known_and_nothing_is_done(agents, monkeypatch):
    a = agents("a")

    def silent() -> Holder | None:
        raise LeaseUnreachable("etcd does not answer")

    monkeypatch.setattr(a._lease, "holder", silent)
    wait_until(lambda: a.address(time.monotonic()) or a.problem)
    assert a.problem == "etcd does not answer" and a.process.address is None
    assert not a.has_moved(time.monotonic(), ("127.0.0.1", 1), silent_s=60.0)
    monkeypatch.undo()
    assert found(a) == a.process.address


def test_an_answer_that_nobody_expects_is_an_error_and_no_silence(agents, monkeypatch):
    a = agents("a")

    def wrong() -> Holder | None:
        raise KeyError("spec")

    monkeypatch.setattr(a._lease, "holder", wrong)
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
