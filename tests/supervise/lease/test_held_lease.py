"""A coordinator keeps its lease as long as it can, and stops before another can have it."""

from __future__ import annotations

import time

import pytest

from argosy.supervise.lease import lease as module
from argosy.supervise.lease.lease import SAFE_S, TTL_S, HeldLease, Holder, LeaseLost, LeaseUnreachable
from waiting import wait_until


class Backend:
    """A backend that answers, is silent or refuses, as the test says."""

    token = "1"

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.calls: list[str] = []

    def holder(self) -> Holder | None:
        return None

    def acquire(self, me: Holder) -> bool:
        return True

    def renew(self) -> None:
        self.answer("renew")

    def check(self, generation: int) -> None:
        self.answer(f"check {generation}")

    def release(self) -> None:
        self.answer("release")

    def answer(self, call: str) -> None:
        self.calls.append(call)
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    monkeypatch.setattr(module, "RENEW_AGAIN_S", 0.05)
    monkeypatch.setattr(module, "SAFE_S", 0.5)
    return Backend()


def test_the_holder_stops_well_before_the_lease_ends():
    assert SAFE_S < 0.8 * TTL_S


def test_it_renews_and_stays_held(backend):
    lease = HeldLease(backend)
    wait_until(lambda: len(backend.calls) > 15)
    assert lease.is_held
    lease.end()
    assert backend.calls[-1] == "release" and not lease.is_held


def test_a_backend_that_is_silent_for_a_moment_is_asked_again(backend):
    lease = HeldLease(backend)
    backend.raises = LeaseUnreachable("silent")
    wait_until(lambda: len(backend.calls) > 3)
    backend.raises = None
    time.sleep(0.6)
    assert lease.is_held
    lease.end()


def test_one_that_cannot_renew_does_not_hold_it_any_more_and_says_why(backend):
    lease = HeldLease(backend)
    backend.raises = LeaseUnreachable("no way to it")
    wait_until(lambda: not lease.is_held)
    assert lease.problem == "no way to it"
    with pytest.raises(LeaseLost, match="no way to it"):
        lease.check(3)
    assert "check 3" not in backend.calls
    count = len(backend.calls)
    backend.raises = None
    lease.end()
    time.sleep(0.2)
    assert len(backend.calls) <= count + 1, "it neither renews again, nor releases what another may hold"


def test_a_lease_that_another_has_taken_is_not_held_from_then_on(backend):
    lease = HeldLease(backend)
    backend.raises = LeaseLost("another has it")
    wait_until(lambda: not lease.is_held)
    assert lease.problem == "another has it"


def test_what_began_is_checked_once_the_backendanswers_again(backend):
    lease = HeldLease(backend)
    backend.raises = LeaseUnreachable("silent")

    def answers(call: str) -> None:
        backend.calls.append(call)
        if backend.calls.count("check 3") < 3:
            raise LeaseUnreachable("silent")

    backend.answer = answers
    lease.check(3)
    assert backend.calls.count("check 3") == 3
    lease.end()


def test_a_process_that_stood_still_knows_it_by_a_clock_that_did_not(backend, monkeypatch):
    lease = HeldLease(backend)
    assert lease.is_held
    now_s = module.clock_s()
    monkeypatch.setattr(module, "clock_s", lambda: now_s + 60)
    assert not lease.is_held
    with pytest.raises(LeaseLost):
        lease.check(1)


def test_a_lease_that_cannot_be_renewed_at_once_is_not_kept(backend):
    backend.raises = LeaseLost("too late")
    with pytest.raises(LeaseLost, match="too late"):
        HeldLease(backend)
