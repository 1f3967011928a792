"""The matrix of faults, its compressed sums: a run that is killed at any moment ends as it would have, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from matrix import Disturbed

pytestmark = pytest.mark.slow

PLANS = {
    "in tiers": "dp_replicate=4,sum_inside=2,zero=1,microbatch=2,sync={}",
    "of shards": "dp_replicate=2,dp_shard=2,zero=1,microbatch=2,sync={}",
}
SMALL = ("--sync.min_elements", "64", "--sync.block", "32", "--sync.rank", "2")
"""Most parameters of the tiny model are compressed, not only the embedding."""
PACE = "slow@forward:seconds=0.05"
"""So that a moment is in the middle of the run, on a quick machine too."""


def kill(run: Disturbed, whom: str, luck: random.Random) -> None:
    """Kill some of the run's processes, at once."""
    if whom == "the command":
        run.kill_and_start_again()
        return
    pids = list(run.pids().values())
    for pid in luck.sample(pids, {"one worker": 1, "two workers": 2, "all workers": len(pids)}[whom]):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("whom", ["one worker", "two workers", "all workers", "the command"])
@pytest.mark.parametrize("word", ["int8", "powersgd"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_compressed_run_that_is_killed_at_any_moment_ends_as_it_would_have(disturbed, undisturbed, plan, word, whom):
    layout, luck = PLANS[plan].format(word), random.Random(f"{plan} {word} {whom}")
    run = disturbed(layout, PACE, *SMALL)
    for first, last in ((2, 8), (10, 16)):
        run.wait_for_step(luck.randrange(first, last))
        time.sleep(luck.uniform(0, 0.2))
        kill(run, whom, luck)
        if whom != "the command":  # which may begin anew, if there is no checkpoint yet
            run.wait_until(lambda: run.events("recovered", "resume"))
    run.end().check(undisturbed(layout, *SMALL), *(() if whom == "the command" else ("worker_died",)))
