"""`auto` fills in what the user left open, by the search, and nothing that was written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config.data import DataConfig
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.train import TrainConfig
from argosy.errors import ArgosyWarning, UserError
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.prediction import predict
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices, choose_plan, may_compile, other_choice, plan_to_go_on
from argosy.plan.search.search import search
from argosy.plan.search.space import check_plan

LAPTOP = Devices(count=2, kind="cpu", fast_bf16=False)
GPUS = Devices(count=8, kind="cuda", fast_bf16=True, name="NVIDIA H100 80GB HBM3")


@pytest.fixture(autouse=True, scope="module")
def _where_nobody_probed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


def run(plan: str = "auto", global_batch: int = 16, seq_len: int = 512) -> RunConfig:
    return RunConfig(plan=plan, train=TrainConfig(steps=1, global_batch=global_batch), data=DataConfig(seq_len=seq_len))


def large(preset: str, plan: str = "auto", **keys: object) -> RunConfig:
    sizes = {"train.global_batch": 64, "data.seq_len": 8192, "model.vocab_size": 128_256}
    return load(None, {"model.preset": preset, "plan": plan, **sizes, **keys})


@pytest.mark.parametrize(
    ("written", "devices", "chosen"),
    [
        ("auto", LAPTOP, "dp_replicate=2,microbatch=8"),
        ("auto", GPUS, "dp_replicate=8,microbatch=2,precision=bf16,bucket_mb=16"),
        ("auto,precision=fp32", GPUS, "dp_replicate=8,microbatch=2,bucket_mb=16"),
        ("auto,microbatch=1", LAPTOP, "dp_replicate=2"),
        ("auto,compile=false", LAPTOP, "dp_replicate=2,microbatch=8,compile=false"),
        ("auto,tp=2", LAPTOP, "tp=2,microbatch=16"),
        ("auto,dp_shard=4,zero=1", GPUS, "dp_replicate=2,dp_shard=4,zero=1,microbatch=2,precision=bf16,bucket_mb=16"),
        ("auto,pp=2", GPUS, "pp=2,dp_replicate=4,microbatch=2,precision=bf16,bucket_mb=8"),
        ("auto,pp=2,schedule=zbv", LAPTOP, "pp=2,schedule=zbv,microbatch=2,compile=false"),
        ("auto,schedule=zbv", Devices(1, "cpu", fast_bf16=False), "schedule=zbv"),
        ("dp_replicate=2", LAPTOP, "dp_replicate=2,microbatch=8"),
        ("dp_replicate=2,microbatch=2,precision=bf16", LAPTOP, "dp_replicate=2,microbatch=2,precision=bf16"),
    ],
)
def test_what_is_left_open_is_chosen_and_what_is_written_stays(written, devices, chosen):
    assert choose_plan(run(written), devices) == Plan.parse(chosen)


@pytest.mark.parametrize(
    ("written", "before", "devices", "kept"),
    [
        ("auto", "dp_replicate=2,microbatch=4,precision=bf16", LAPTOP, "dp_replicate=2,microbatch=4,precision=bf16"),
        ("auto", "dp_replicate=4,microbatch=2,precision=bf16", LAPTOP, "dp_replicate=2,microbatch=8,precision=bf16"),
        ("auto", "microbatch=4,weights=bf16,compile=false", LAPTOP, "dp_replicate=2,microbatch=8,weights=bf16,"
         "compile=false"),
        ("auto", "dp_replicate=8,microbatch=1", GPUS, "dp_replicate=8,microbatch=1"),
        ("auto,tp=2", "dp_replicate=2,microbatch=8", LAPTOP, "tp=2,microbatch=16"),
        ("dp_replicate=2", "dp_replicate=2,microbatch=2,precision=bf16", LAPTOP, "dp_replicate=2,microbatch=2,"
         "precision=bf16"),
        ("tp=2", "dp_replicate=2,microbatch=2,precision=bf16", LAPTOP, "tp=2,microbatch=16,precision=bf16"),
        ("auto,precision=fp32", "dp_replicate=2,microbatch=8,precision=bf16", LAPTOP, "dp_replicate=2,microbatch=8"),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_keeps_its_plan_and_on_other_devices_its_numbers(written, before, devices, kept):
    assert plan_to_go_on(run(written), devices, Plan.parse(before)) == Plan.parse(kept)


def test_a_plan_that_does_not_fit_the_same_number_of_smaller_gpus_is_chosen_again():
    before = choose_plan(large("llama3-8b"), GPUS)
    smaller = Devices(8, "cuda", fast_bf16=True, name="NVIDIA H100 80GB HBM3", memory_bytes=24e9)
    assert plan_to_go_on(large("llama3-8b"), GPUS, before) == before
    assert plan_to_go_on(large("llama3-8b"), smaller, before) != before


def test_what_a_new_run_would_choose_is_offered_in_words():
    said = other_choice(run("auto"), LAPTOP, Plan(precision="bf16"))
    assert "goes on in bf16" in said and "--plan auto,precision=fp32" in said
    assert not other_choice(run("auto"), LAPTOP, Plan())
    assert not other_choice(run("auto,precision=bf16"), LAPTOP, Plan(precision="bf16"))


def test_the_demo_is_plain_data_parallelism_with_one_microbatch():
    demo = load("demo", {"model.vocab_size": 4096})
    assert choose_plan(demo, LAPTOP) == Plan(dp_replicate=2, microbatch=4)


@settings(deadline=None, max_examples=30)
@given(
    per_rank=st.integers(1, 96),
    count=st.integers(1, 16),
    seq_len=st.sampled_from([1, 7, 64, 512, 8192]),
    kind=st.sampled_from(["cpu", "cuda"]),
)
def test_any_batch_that_the_devices_can_share_gets_a_plan_for_all_of_them(per_rank, count, seq_len, kind):
    run_ = run(global_batch=per_rank * count, seq_len=seq_len)
    plan = choose_plan(run_, Devices(count, kind, fast_bf16=False))
    check_plan(plan, run_, count)


@pytest.mark.parametrize(("global_batch", "near"), [(10, "8 or 12"), (3, "4"), (33, "32 or 36")])
def test_a_batch_that_the_written_axes_cannot_share_is_refused_with_the_nearest_that_they_can(global_batch, near):
    devices = Devices(count=4, kind="cpu", fast_bf16=False)
    message = rf"global_batch = {global_batch} is not a multiple of 4 .*Try {near}\."
    with pytest.raises(UserError, match=message):
        choose_plan(run("auto,dp_replicate=4", global_batch=global_batch), devices)


@pytest.mark.parametrize("global_batch", [10, 3, 33])
def test_a_batch_that_data_parallelism_cannot_share_gets_another_layout(global_batch):
    run_ = run(global_batch=global_batch)
    check_plan(choose_plan(run_, Devices(4, "cpu", fast_bf16=False)), run_, 4)


def test_a_plan_for_other_devices_is_refused():
    with pytest.raises(UserError, match=r"is for 4 processes, and there are 2"):
        choose_plan(run("dp_replicate=4"), LAPTOP)
    with pytest.raises(UserError, match=r"is for 4 processes, and there are 2"):
        choose_plan(run("auto,tp=4"), LAPTOP)


def test_a_plan_that_cannot_train_the_run_is_refused():
    with pytest.raises(UserError, match=r"plan\.tp = 8 does not divide model\.heads = 4"):
        choose_plan(run("auto,tp=8"), GPUS)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
@pytest.mark.parametrize("rows", [3, 9, 14, 18])
def test_a_pipeline_gets_a_microbatch_that_its_schedule_can_run(schedule, rows):
    run_ = run(f"auto,pp=4,schedule={schedule}", rows)
    run_ = run_.model_copy(update={"model": run_.model.model_copy(update={"layers": 8})})
    stages = 8 if schedule == "dualpipev" else 4
    if rows < stages and schedule in ("1f1b", "dualpipev"):
        with pytest.raises(UserError, match=f"cannot run {rows} microbatches"):
            choose_plan(run_, Devices(4, "cuda", fast_bf16=True))
        return
    check_plan(choose_plan(run_, Devices(4, "cuda", fast_bf16=True)), run_, 4)


@pytest.mark.parametrize("preset", ["llama3-8b", "qwen3-14b"])
def test_a_model_that_no_gpu_holds_gets_a_plan_that_fits_and_is_about_as_fast_as_any(preset):
    run_ = large(preset)
    plan = choose_plan(run_, GPUS)
    assert plan.pp * plan.tp * plan.dp_shard > 1
    costs = CostModel.of(run_, Cluster.parse("8xh100"))
    found = search(costs, {})
    near = np.flatnonzero(found.step_s <= 1.03 * found.step_s.min())
    assert plan in [found.plans.plan(int(row)) for row in near]


def test_state_goes_to_the_host_only_where_it_must():
    one = Devices(1, "cuda", fast_bf16=True, name="NVIDIA H100 80GB HBM3")
    assert choose_plan(large("llama3.2-1b"), one).offload == "none"
    assert choose_plan(large("llama3-8b"), one).offload in ("optimizer", "all")


def test_what_fits_nowhere_is_refused_with_the_figures():
    with pytest.raises(UserError, match=r"nothing fits: of [\d,]+ plans .* needs [\d.]+ GiB .* optimizer takes"):
        choose_plan(large("llama3-70b", "auto,offload=none"), GPUS)
    assert choose_plan(large("llama3-70b", "dp_shard=8"), GPUS).dp_shard == 8  # who says the axes tries them


def test_the_memory_that_the_driver_tells_counts():
    small = Devices(8, "cuda", fast_bf16=True, name="NVIDIA H100 80GB HBM3", memory_bytes=20e9)
    assert choose_plan(large("llama3-8b"), small) != choose_plan(large("llama3-8b"), GPUS)


T4S = Devices(2, "cuda", fast_bf16=False, fast_fp16=True, name="Tesla T4")


def test_a_gpu_without_bf16_takes_fp16():
    assert choose_plan(run(), T4S).precision == "fp16"
    assert choose_plan(run("auto,precision=fp32"), T4S).precision == "fp32"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("auto,precision=bf16", r"T4 has no bf16 matmuls\. Try"),
        ("dp_replicate=2,precision=fp8", r"8\.9 or more .* this one is T4 \(compute capability 7\.5\)\. Try"),
    ],
)
def test_a_precision_that_the_gpu_has_not_is_refused(plan, message):
    with pytest.raises(UserError, match=rf"{message} precision=fp16 or fp32\."):
        choose_plan(run(plan), T4S)


def test_what_the_driver_says_of_a_gpu_that_the_catalogue_does_not_know_decides_on_fp8():
    unknown = Devices(2, "cuda", fast_bf16=True, name="NVIDIA Titan Q", compute_capability=8.6)
    with (
        pytest.warns(ArgosyWarning, match="does not know"),
        pytest.raises(UserError, match=r"this one is NVIDIA Titan Q \(compute capability 8\.6\)"),
    ):
        choose_plan(run("dp_replicate=2,precision=fp8"), unknown)
    with pytest.warns(ArgosyWarning, match="does not know"):
        choose_plan(run("dp_replicate=2,precision=fp8"), replace(unknown, compute_capability=8.9))


def test_a_gpu_that_the_catalogue_does_not_know_gets_a_plan_and_a_warning():
    with pytest.warns(ArgosyWarning, match="does not know NVIDIA Titan Q"):
        plan = choose_plan(run(), Devices(2, "cuda", fast_bf16=True, name="NVIDIA Titan Q", memory_bytes=24e9))
    assert plan.world_size == 2


@pytest.mark.parametrize(
    ("said", "word"),
    [("auto", "layers="), ("auto,pp=1", "shares=3:1"), ("auto,shares=,pp=1", ""), ("dp_shard=16,zero=2", "")],
)
def test_on_devices_of_several_kinds_auto_deals_work_out_by_their_speed(said, word):
    run = load(None, {"model.preset": "llama3-8b", "train.global_batch": 64, "data.seq_len": 4096, "plan": said})
    mixed = Cluster.parse("8xh100+8xa100")
    plan = choose_plan(run, Devices(16, "cuda", fast_bf16=True), mixed)
    assert word in str(plan) if word else not (plan.shares or plan.layers)
    check_plan(plan, run, 16)
    even = plan.model_copy(update={"shares": "", "layers": ""})
    assert predict(plan, run, mixed).step_s.mid < 0.97 * predict(even, run, mixed).step_s.mid or not word


@pytest.mark.parametrize(
    ("plan", "compiles"),
    [("auto", True), ("dp_replicate=2", True), ("auto,compile=false", False), ("tp=2,compile=false", False)],
)
def test_only_a_written_plan_says_that_nothing_is_compiled(plan, compiles):
    assert may_compile(plan) is compiles
