"""The matrix of faults: a rank that is slower than its peers is named, and nobody is evicted for nothing."""

from __future__ import annotations

import pytest

from matrix import STEADY

WINDOW = 20
"""resilience.straggler_steps, as it is by default."""
BUSY_S = 0.05
"""Each rank's own work in a microbatch, most of it sleep: other programs on the machine do not stretch it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "steps", "within"),
    [
        (f"slow@forward:rank=1,seconds={2.2 * BUSY_S}", 60, 2 * WINDOW),
        (f"slow@forward:rank=1,seconds={10 * BUSY_S}", 30, 2 * WINDOW),
        (f"slow@forward:rank=1,seconds={BUSY_S}; slow@forward:rank=1,every=4,seconds={8 * BUSY_S}", 180, 10 * WINDOW),
    ],
    ids=["2x", "10x", "periodic"],
)
def test_a_slow_rank_is_named_within_the_window_and_no_healthy_one_is_evicted(
    disturbed, undisturbed, slow, steps, within
):
    length = ("--train.steps", str(steps), *STEADY)
    options = (*length, "--resilience.straggler_s", "1")
    run = disturbed("dp_replicate=2,microbatch=4", f"slow@forward:rank=0,seconds={BUSY_S}; {slow}", *options)
    run.end(timeout_s=300)
    found = run.events("straggler")
    assert {tuple(e["ranks"]) for e in found} == {(1,)}, found
    assert found[0]["action"] == "alarm" and found[0]["evidence"]["last_step"] < within
    assert len(run.events("generation")) == 1, "nobody was sent away"
    run.check(undisturbed("dp_replicate=2,microbatch=4", *length), "straggler")
