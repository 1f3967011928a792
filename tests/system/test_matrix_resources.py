"""The matrix of faults: memory, descriptors and shared memory that run out, of real limits of the kernel."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

MIB = 2**20
CGROUPS = Path("/sys/fs/cgroup")
SLOW_STEPS = "slow@forward:seconds=0.1"
"""So that there is time to strike from outside."""


@pytest.fixture
def memory_limit() -> Iterator[tuple[str, ...]]:
    """A command that runs the one given after it in a control group of its own that may have 1.5 GiB of memory."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    group = (CGROUPS if is_v2 else CGROUPS / "memory") / f"argosy-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(1536 * MIB))
    except OSError as problem:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a limit of memory can be made here: {problem}")
    yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    group.rmdir()


@pytest.fixture
def small_shared_memory() -> tuple[str, ...]:
    """A command that runs the one given after it with a /dev/shm of its own, of 32 MiB."""
    mount = 'mount -t tmpfs -o size=32m tmpfs /dev/shm && exec "$@"'
    command = ("unshare", "--mount", "sh", "-c", mount, "sh")
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a mount namespace needs the rights of root")
    return command


def fill(file: Path) -> None:
    """Take all room that is left where `file` lies."""
    with file.open("wb") as out, suppress(OSError):
        while True:
            os.write(out.fileno(), bytes(64 * 1024))


@pytest.mark.slow
def test_a_worker_that_the_kernel_kills_for_memory_is_replaced_and_the_kernel_blamed(
    disturbed, undisturbed, memory_limit
):
    run = disturbed(faults="oom@forward:step=6,rank=1,gib=4", within=memory_limit).end()
    (died,) = run.events("worker_died")
    assert died["rank"] == 1 and "kernel killed" in died["why"] and "memory" in died["why"]
    (told,) = run.events("oom_kill")
    assert told["evidence"]["oom_kills"] == 1 and "memory ran out" in run.text
    run.check(undisturbed(), "oom_kill", "worker_died")


@pytest.mark.slow
def test_a_worker_without_a_descriptor_left_is_named_before_and_replaced_after(disturbed, undisturbed):
    run = disturbed(faults=SLOW_STEPS).wait_for_step(4)
    victim = run.pids()[1]
    used = len(list(Path(f"/proc/{victim}/fd").iterdir()))
    resource.prlimit(victim, resource.RLIMIT_NOFILE, (used, used))
    run.wait_until(lambda: run.events("limit_near"))
    run.send(0, signal.SIGKILL)
    run.end()
    (told,) = run.events("limit_near")
    assert told["evidence"]["limit"] == used and f"process {victim} has" in told["why"]
    died = {e["pid"]: e["why"] for e in run.events("worker_died")}
    assert "Too many open files" in died[victim], died
    # A checkpoint that is due in between cannot be written.
    run.check(undisturbed(), "limit_near", "worker_died", *{e["event"] for e in run.events("save_failed")})


@pytest.mark.slow
def test_shared_memory_that_is_full_is_told_and_training_goes_on(disturbed, undisturbed, small_shared_memory):
    run = disturbed(faults=SLOW_STEPS, within=small_shared_memory).wait_for_step(4)
    filler = Path(f"/proc/{run.process.pid}/root/dev/shm/filler")
    fill(filler)
    run.wait_until(lambda: run.events("limit_near"))
    (told,) = run.events("limit_near")
    assert "/dev/shm" in told["why"]
    run.end().check(undisturbed(), "limit_near")


@pytest.mark.slow
def test_a_run_that_finds_shared_memory_full_says_so_and_ends(disturbed, undisturbed, small_shared_memory):
    *mount, shell = small_shared_memory
    mount[-1] = mount[-1].replace("exec", "head -c 32m /dev/zero > /dev/shm/filler; exec")
    run = disturbed(within=(*mount, shell)).end(code=75)
    died = run.events("worker_died")
    assert died and all("/dev/shm" in e["why"] and "No space left on device" in e["why"] for e in died), died
    assert "/dev/shm" in run.text.splitlines()[-1] and not run.steps()
    run.check_nothing_is_left()
    run.within = ()
    run.start().end().check(undisturbed(), "limit_near", "worker_died")
