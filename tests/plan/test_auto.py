"""`auto` fills in what the user left open, and nothing that was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.schema import DataConfig, RunConfig, TrainConfig
from argosy.errors import UserError
from argosy.plan.auto import MICROBATCH_TOKENS, Devices, choose_plan
from argosy.plan.plan import Plan

LAPTOP = Devices(count=2, kind="cpu", fast_bf16=False)
GPUS = Devices(count=8, kind="cuda", fast_bf16=True)


def run(plan: str = "auto", global_batch: int = 16, seq_len: int = 512) -> RunConfig:
    return RunConfig(plan=plan, train=TrainConfig(steps=1, global_batch=global_batch), data=DataConfig(seq_len=seq_len))


@pytest.mark.parametrize(
    ("written", "devices", "chosen"),
    [
        ("auto", LAPTOP, "dp_replicate=2,microbatch=8"),
        ("auto", GPUS, "dp_replicate=8,microbatch=2,precision=bf16"),
        ("auto,precision=fp32", GPUS, "dp_replicate=8,microbatch=2"),
        ("auto,microbatch=1", LAPTOP, "dp_replicate=2"),
        ("auto,compile=false", LAPTOP, "dp_replicate=2,microbatch=8,compile=false"),
        ("auto,tp=2", LAPTOP, "tp=2,microbatch=8"),
        ("auto,tp=2", GPUS, "dp_replicate=4,tp=2,microbatch=4,precision=bf16"),
        ("auto,dp_shard=4,zero=1", GPUS, "dp_replicate=2,dp_shard=4,zero=1,microbatch=2,precision=bf16"),
        ("auto,pp=2", GPUS, "pp=2,dp_replicate=4,microbatch=2,precision=bf16"),
        ("auto,pp=2,schedule=zbv", LAPTOP, "pp=2,schedule=zbv,microbatch=4,compile=false"),
        ("dp_replicate=2", LAPTOP, "dp_replicate=2,microbatch=8"),
        ("dp_replicate=2,microbatch=2,precision=bf16", LAPTOP, "dp_replicate=2,microbatch=2,precision=bf16"),
    ],
)
def test_what_is_left_open_is_chosen_and_what_is_written_stays(written, devices, chosen):
    assert choose_plan(run(written), devices) == Plan.parse(chosen)


@given(
    per_rank=st.integers(1, 96),
    count=st.integers(1, 16),
    seq_len=st.integers(1, 8192),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_any_batch_that_the_devices_can_share_gets_a_plan_within_the_tokens_of_a_device(per_rank, count, seq_len, kind):
    run_ = run(global_batch=per_rank * count, seq_len=seq_len)
    plan = choose_plan(run_, Devices(count, kind, fast_bf16=False))
    assert plan.world_size == count
    assert plan.microbatches(per_rank * count) * plan.microbatch == per_rank
    assert plan.microbatch == 1 or plan.microbatch * seq_len <= MICROBATCH_TOKENS[kind]


@pytest.mark.parametrize(("global_batch", "near"), [(10, "8 or 12"), (3, "4"), (33, "32 or 36")])
def test_a_batch_that_the_devices_cannot_share_is_refused_with_the_nearest_that_they_can(global_batch, near):
    devices = Devices(count=4, kind="cpu", fast_bf16=False)
    message = rf"global_batch = {global_batch} is not a multiple of 4 .*Try {near}\."
    with pytest.raises(UserError, match=message):
        choose_plan(run(global_batch=global_batch), devices)


def test_a_plan_for_other_devices_is_refused():
    with pytest.raises(UserError, match=r"is for 4 processes, and launch\.processes = 2"):
        choose_plan(run("dp_replicate=4"), LAPTOP)
    with pytest.raises(UserError, match=r"is for 4 processes, and launch\.processes = 2"):
        choose_plan(run("auto,tp=4"), LAPTOP)


def test_a_plan_that_cannot_train_the_run_is_refused():
    with pytest.raises(UserError, match=r"plan\.tp = 8 does not divide model\.heads = 4"):
        choose_plan(run("auto,tp=8"), GPUS)


@given(
    per_rank=st.integers(1, 96),
    pp=st.sampled_from([2, 3, 4]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zbv", "dualpipev"]),
    seq_len=st.sampled_from([64, 512, 4096]),
)
def test_a_pipeline_gets_as_many_microbatches_as_it_has_stages_if_the_batch_has_as_many_rows(
    per_rank, pp, schedule, seq_len
):
    run_ = run(f"auto,pp={pp},schedule={schedule}", per_rank, seq_len)
    run_ = run_.model_copy(update={"model": run_.model.model_copy(update={"layers": 8})})
    stages = 2 * pp if schedule in ("zbv", "dualpipev") else pp
    if per_rank < stages and schedule in ("1f1b", "dualpipev"):
        with pytest.raises(UserError, match=f"cannot run {per_rank} microbatches"):
            choose_plan(run_, Devices(pp, "cuda", fast_bf16=True))
        return
    plan = choose_plan(run_, Devices(pp, "cuda", fast_bf16=True))
    assert plan.stages == stages
    assert plan.microbatches(per_rank) >= min(stages, per_rank)
    assert plan.microbatch == 1 or plan.microbatch * seq_len <= MICROBATCH_TOKENS["cuda"]


@pytest.mark.parametrize(
    ("schedule", "rows", "microbatch"),
    [
        ("interleaved_1f1b", 16, 2),
        ("interleaved_1f1b", 14, 2),  # of one row each, 14 microbatches are not a multiple of 3 rounds
        ("interleaved_zero_bubble", 18, 3),
        ("interleaved_1f1b", 9, 3),  # the nearest below 8 microbatches
    ],
)
def test_the_microbatch_is_one_that_the_schedule_can_run(schedule, rows, microbatch):
    run_ = run(f"auto,pp=4,schedule={schedule}", rows)
    run_ = run_.model_copy(update={"model": run_.model.model_copy(update={"layers": 8})})
    assert choose_plan(run_, Devices(4, "cuda", fast_bf16=True)).microbatch == microbatch
