"""Strangers at the coordinator's port: a run that trains meanwhile loses no step and no process."""

from __future__ import annotations

import resource
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from argosy.chaos.campaign import descendants
from hostile import Recorder, babble, flood, guess, half_open, replay
from matrix import PLANS, Disturbed
from ports import free_port
from waiting import PATIENT_S

SLOW = "slow@batch:seconds=0.5"
"""Each step takes so long at least, so that the run lasts as long as the strangers."""
MEMORY_BYTES = 100 << 20
"""What the coordinator's memory may grow by."""


class Attacked:
    """A run on two nodes of this machine that has made two steps; what the second says is recorded on its way."""

    def __init__(self, disturbed: Callable[..., Disturbed], *options: str):
        self.port = free_port()
        self._recorder = Recorder(self.port)
        self._run = disturbed(
            PLANS["replicas"], SLOW, "--launch.nodes", "2", "--launch.processes", "1",
            *("--launch.node", "a", "--launch.coordinator", f"127.0.0.1:{self.port}"), *options,
        )  # fmt: skip
        to_recorder = f"127.0.0.1:{self._recorder.port}"
        self._second = self._run.launch("--launch.node", "b", "--launch.coordinator", to_recorder)
        self._run.wait_for_step(2)
        (started,) = self._run.events("coordinator_started")
        self._coordinator = started["pid"]
        self._before_bytes = self._peak_bytes()

    @property
    def recorded(self) -> bytes:
        return bytes(self._recorder.recorded)

    def check(self, healthy: Disturbed) -> None:
        """The run ends as it should, in its first world, with the process that coordinated it from the start."""
        assert self._peak_bytes() - self._before_bytes < MEMORY_BYTES
        self._run.end()
        self._second.communicate(timeout=PATIENT_S)
        self._recorder.close()
        assert len(self._run.events("generation")) == len(self._run.events("coordinator_started")) == 1
        assert self._run.events("connections_refused")
        self._run.check(healthy)

    def _peak_bytes(self) -> int:
        status = Path(f"/proc/{self._coordinator}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def test_no_stranger_disturbs_a_run(disturbed, undisturbed):
    healthy = undisturbed(PLANS["replicas"])
    run = Attacked(disturbed)
    another_run_s = secrets.token_hex(32).encode()
    with half_open(run.port, 600):
        replay(run.port, run.recorded)
        assert all("does not know this run's secret" in why for why in guess(run.port, another_run_s, b"", b"x" * 9999))
        babble(run.port, seed=1, times=50)
        flood(run.port, 500, seconds=1)
        replay(run.port, run.recorded)
    run.check(healthy)


def test_on_one_machine_strangers_find_no_store_and_workers_have_all_the_descriptors_they_may(disturbed):
    """All users of the machine reach what listens on loopback: gloo's listeners cannot be closed to them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        run = disturbed(PLANS["replicas"], SLOW)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    run.wait_for_step(2)
    workers = {event["pid"] for event in run.events("worker_started")}
    known = workers | {event["pid"] for event in run.events("coordinator_started")}
    assert {pid for pid in descendants(run.agents[0]) if listens(pid)} <= known
    assert {resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in workers} == {(hard, hard)}
    run.end()


def listens(pid: int) -> bool:
    """True if a socket of the process listens on a port."""
    tables = "".join(Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    listening = {f"socket:[{line.split()[9]}]" for line in tables.splitlines() if line.split()[3] == "0A"}
    return any(str(link.readlink()) in listening for link in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.slow
def test_ten_thousand_connections_in_a_minute_cost_no_step(disturbed, undisturbed):
    long = ("--train.steps", "160", "--optimizer.lr", "1e-3")
    healthy = undisturbed(PLANS["replicas"], *long)
    run = Attacked(disturbed, *long)
    began = time.monotonic()
    flood(run.port, 10_000, seconds=60)
    assert time.monotonic() - began < 90
    run.check(healthy)
