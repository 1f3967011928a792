"""The matrix of faults: conversations, preferences and adapters outlive what text does."""

from __future__ import annotations

import random
import signal

import pytest

PLAN = "dp_shard=2,zero=1,microbatch=2"
CASES = {
    "sft": ("sft", ()),
    "dpo": ("dpo", ()),
    "lora": ("sft", ("--lora.rank", "4")),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_tuning_run_killed_at_random_ends_bit_for_bit(disturbed, undisturbed, tuning, case):
    """Processes of either rank, and the command with all of its processes, which is given again."""
    objective, more = CASES[case]
    chance, given = random.Random(case), (*tuning(objective), *more)
    run = disturbed(PLAN, "slow@forward:seconds=0.1", *given, "--launch.max_restarts", "10")
    run.wait_for_step(4)  # there is something to go back to
    for whom in chance.sample(["worker", "worker", "command"], 3):
        run.wait_for_step(run.steps() + chance.randrange(1, 4))
        if whom == "command":
            run.kill_and_start_again()
        else:
            known = len(run.events("recovered"))
            run.send(chance.randrange(2), signal.SIGKILL)
            run.wait_until(lambda known=known: len(run.events("recovered")) > known)
    run.end().check(undisturbed(PLAN, *given), "worker_died")
