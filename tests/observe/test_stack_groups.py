"""Stacks of many ranks are shown once for each place."""

from __future__ import annotations

from typing import Any

from argosy.observe.stack_groups import groups, in_words, threads_of

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
