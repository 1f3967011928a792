"""`argosy train --profile`."""

from __future__ import annotations

import json

import pytest

from matrix import PLANS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "4:9"], ("observe.profile.steps = 4:9", "the steps 0 to 5", "3:6")),
        (["--profile", "4:2"], ("observe.profile.steps", "4:2", "END must exceed", "4:7")),
        (["--profile=now"], ("observe.profile.steps", "now", "10:13")),
        pytest.param(
            ["--profile", "2:4", "--observe.profile.ranks", "0,7"],
            ("observe.profile.ranks = 0,7", "rank 7", "0 to 1"),
            marks=pytest.mark.slow,
        ),
        (["--profile", "2:4", "--observe.profile.ranks", "some"], ("observe.profile.ranks", "some", "such as 0,7")),
    ],
    ids=["beyond the end", "backwards", "no range", "no such rank", "no ranks"],
)  # fmt: skip
def test_what_cannot_be_profiled_is_refused(folder, refused, options, said):
    folder.write_run(steps=6)
    refused("train", "run.toml", *options, said=said)


@pytest.mark.slow
def test_a_rank_that_dies_while_it_records_costs_no_loss(disturbed, undisturbed):
    run = disturbed(PLANS["replicas"], "kill@optimizer:step=5,rank=1", "--profile", "3:7").end()
    assert "profile of step 6" in run.text
    run.check(undisturbed(), "worker_died")
    summary = json.loads((run.run_dir / "profiles" / "step-00000003-00000007" / "summary.json").read_text())
    assert summary["steps"] == [6, 6]
