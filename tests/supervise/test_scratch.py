"""The folder that an agent keeps for its workers is its own, and is not left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from argosy.supervise import scratch
from argosy.supervise.scratch import MEMORY_FOLDER, SCRATCH_LOCK, scratch_folder
from waiting import PATIENT_S


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scratch, "SCRATCH", tmp_path)


def test_it_is_named_after_its_process_and_is_gone_afterwards(tmp_path):
    with pytest.raises(LookupError), scratch_folder() as folder:
        assert folder.parent == tmp_path and folder.name.startswith(f"argosy-{os.getpid()}-")
        (folder / MEMORY_FOLDER / "checkpoint").write_bytes(b"x")
        raise LookupError
    assert not list(tmp_path.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from argosy.supervise import scratch
scratch.SCRATCH = Path(sys.argv[1])
with scratch.scratch_folder() as folder:
    print(folder, flush=True)
    time.sleep(60)
"""
SWEEP = HOLD.replace("time.sleep(60)", "pass")
OTHER_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def test_the_folder_of_an_agent_that_was_killed_is_removed_and_one_of_another_that_lives_is_not(tmp_path):
    other = tmp_path / "argosy-1234567-of-an-older-version"
    other.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as agent:
        folder = Path(agent.stdout.readline().strip())
        assert folder.parent == tmp_path and folder.is_dir()
        with scratch_folder():
            assert folder.is_dir()
        agent.kill()
        agent.wait()
        assert folder.is_dir(), "nobody was there to remove it"
        with scratch_folder():
            assert not folder.exists()
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "another user's"])
def test_what_another_user_puts_in_the_shared_folder_neither_holds_a_start_nor_is_removed(tmp_path, kind):
    folder = tmp_path / "argosy-1-x"
    folder.mkdir()
    if kind == "another user's":
        if os.geteuid():
            pytest.skip("a file of another user's needs the rights of root")
        (folder / SCRATCH_LOCK).touch()
        os.chown(folder, 65534, 65534)
    else:
        pipe = folder / SCRATCH_LOCK if kind == "pipe" else tmp_path / "pipe"
        os.mkfifo(pipe)
        if not (folder / SCRATCH_LOCK).exists():
            (folder / SCRATCH_LOCK).symlink_to(pipe)
    started = subprocess.run([sys.executable, "-c", SWEEP, str(tmp_path)], timeout=PATIENT_S, check=False)
    assert started.returncode == 0 and os.path.lexists(folder / SCRATCH_LOCK)


def test_an_agent_among_other_processes_does_not_remove_what_a_living_one_holds(tmp_path):
    """As in two containers that share memory: no process of one is there for the other."""
    if subprocess.run([*OTHER_PROCESSES, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a namespace of processes needs the rights of root")
    with scratch_folder() as folder:
        swept = subprocess.run([*OTHER_PROCESSES, sys.executable, "-c", SWEEP, str(tmp_path)], check=True)
        assert swept.returncode == 0 and (folder / MEMORY_FOLDER).is_dir()
    agent = subprocess.Popen(
        [*OTHER_PROCESSES, sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with agent:
        folder = Path(agent.stdout.readline().strip())
        with scratch_folder():
            assert (folder / MEMORY_FOLDER).is_dir()
        agent.kill()
    end_s = time.monotonic() + 10  # the process inside dies a moment after the one that holds the namespace
    while folder.exists() and time.monotonic() < end_s:
        with scratch_folder():
            pass
    assert not folder.exists()
