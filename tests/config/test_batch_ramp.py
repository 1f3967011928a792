"""The batch of each step of a ramp, and the samples before it."""

from __future__ import annotations

from itertools import accumulate

import pytest

from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.train import BatchSizes
from argosy.errors import UserError

RAMP = BatchSizes(32, ((3, 4), (10, 8), (11, 16)))


def test_the_closed_form_is_the_sum_over_steps():
    sizes = [4] * 3 + [8] * 7 + [16] + [32] * 9
    assert [RAMP.at(step) for step in range(20)] == sizes
    assert [RAMP.before(step) for step in range(21)] == [0, *accumulate(sizes)]
    assert RAMP.steps_of(20) == [(4, 3), (8, 7), (16, 1), (32, 9)]
    assert RAMP.steps_of(5) == [(4, 3), (8, 2)]
    assert RAMP.steps_like(9, 10, 12) == (16 + 32) / 8


def test_without_stages_every_step_is_alike():
    assert [BatchSizes(6).before(step) for step in range(3)] == [0, 6, 12]


def test_a_run_counts_its_tokens_by_step():
    stages = [{"until_step": 2, "global_batch": 2}]
    train = {"steps": 5, "global_batch": 8, "batch_ramp": stages}
    run = RunConfig.model_validate({"data": {"seq_len": 16}, "train": train})
    assert [run.tokens_at(step) for step in range(4)] == [32, 32, 128, 128]
    assert run.tokens_before(5) == (2 * 2 + 3 * 8) * 16


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ("[{until_step = 9, global_batch = 2}, {until_step = 5, global_batch = 4}]", r"until_step = \[9, 5\] must asc"),
        ("[{until_step = 5, global_batch = 16}]", r"the batch must grow .* global_batch = 8, and is \[16, 8\]"),
        ("[{until_step = 50, global_batch = 4}]", "until_step = 50 leaves none of steps = 50"),
        ("[{until_step = 0, global_batch = 4}]", "until_step"),
        ("[{from_step = 3, global_batch = 4}]", "from_step"),
    ],
)
def test_a_ramp_that_is_none_is_refused_with_its_place(tmp_path, ramp, message):
    file = tmp_path / "run.toml"
    file.write_text(f"[train]\nsteps = 50\nglobal_batch = 8\nbatch_ramp = {ramp}\n")
    with pytest.raises(UserError, match=message) as refused:
        load(str(file))
    assert "run.toml:" in str(refused.value)


def test_a_run_in_minutes_has_no_ramp(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nminutes = 5\nglobal_batch = 8\nbatch_ramp = [{until_step = 5, global_batch = 4}]\n")
    with pytest.raises(UserError, match="needs the run's length in steps"):
        load(str(file), {"train.steps": 0})
