"""Stacks of many ranks are shown once for each place.

A process that hangs says where, even with Python's lock held.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy.cli import main
from argosy.observe import stacks
from argosy.observe.stacks import groups, in_words, threads_of

DUMP = """Current thread 0x00007f (most recent call first):
  File "/x/lib/python3.11/threading.py", line 324 in wait

Thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line {line} in all_reduce
  File "/home/me/src/argosy/supervise/worker.py", line 141 in main
  File "/home/me/src/argosy/processes/fork_server.py", line 101 in main
"""


def worker(rank: int | None, line: int = 7, **facts: Any) -> dict[str, Any]:
    seen = {"rank": rank, "pid": 100 + (rank or 0), "step": 5, "phase": "forward", "phase_s": 2.0}
    return {**seen, "stack": DUMP.format(line=line), **facts}


def test_the_main_thread_comes_first_and_files_are_short():
    first, second = threads_of(DUMP.format(line=7))
    assert first == [
        ("torch/distributed/distributed_c10d.py", "7", "all_reduce"), ("argosy/supervise/worker.py", "141", "main")
    ]  # fmt: skip
    assert second == [("python3.11/threading.py", "324", "wait")]


def test_ranks_at_one_place_are_shown_once_the_rarest_first():
    workers = [worker(rank, line=9 if rank == 7 else 7) for rank in range(16)]
    assert [len(some) for some, _, _ in groups(workers)] == [1, 15]
    shown = in_words(workers).splitlines()
    heads = [line for line in shown if line.startswith("rank")]
    assert heads == ["rank 7: step 5, forward for 2.0 s", "ranks 0-6, 8-15: step 5, forward for 2.0 s"]
    assert sum("all_reduce" in line for line in shown) == 2


def test_who_has_begun_fewer_collectives_is_named():
    workers = [worker(rank, collectives={"tp#1": 40 if rank in (2, 3) else 42, "pp#2": 7}) for rank in range(6)]
    shown = in_words(workers)
    assert shown.startswith("tp#1: ranks 2-3 have begun 2 collectives fewer than the others (40 of 42)\n")
    assert "pp#2" not in shown


def test_a_process_that_says_nothing_is_shown_with_what_is_wrong():
    shown = in_words([worker(0), {"rank": 1, "pid": 7, "problem": "it is stopped"}, {"rank": None, "pid": 9}])
    assert "rank 1: ? for 0.0 s\n  it is stopped" in shown and "process 9:" in shown


def test_other_threads_are_shown_on_request():
    assert "threading.py" not in in_words([worker(0)]) and "threading.py:324" in in_words([worker(0)], is_all=True)


HANGS = {
    "sleeps": "import time; time.sleep(60)",
    "holds the lock": "import ctypes; [ctypes.PyDLL(None).sleep(60) for _ in range(9)]",  # a signal ends one of them
}
CODE = """
import sys
from argosy.observe.stacks import write_when_asked
write_when_asked(2)
def here():
    print("ready", flush=True)
    {hang}
here()
"""


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_it_writes_its_stacks_and_lives_on(tmp_path: Path, hang: str) -> None:
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", CODE.format(hang=hang)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    process.stdout.readline()
    stacks.ask(process.pid)
    try:
        assert "in here" in (tmp_path / "log").read_text() and process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_one_that_is_gone_is_not_asked() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    stacks.ask(process.pid)


def test_of_a_run_of_several_sites_one_is_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "sites" / "oslo"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.toml").touch()
    assert main(["stacks", str(tmp_path)]) == 2
    assert f"Name one, such as {tmp_path}/sites/oslo" in capsys.readouterr().err
