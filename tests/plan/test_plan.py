"""A plan says one layout, as a string, as a file, and refuses what cannot be run."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_plans import plans, run
from argosy.errors import UserError
from argosy.plan.pipeline import SCHEDULES
from argosy.plan.plan import Plan, check_can_estimate, words_of
from argosy.plan.search.auto import Devices, choose_plan
from argosy.plan.sync import SYNC_WORDS

SIZES = st.integers(1, 4096)
PLANS = plans(
    SIZES,
    stages_per_rank=SIZES,
    recompute_every=SIZES,
    offload=st.sampled_from(["none", "activations", "optimizer", "all"]),
    microbatch=SIZES,
    reduce=st.sampled_from(["fp32", "bf16"]),
    sync=st.sampled_from(SYNC_WORDS),
    sum_inside=SIZES,
    sum_between=SIZES,
    bucket_mb=st.integers(1, 64),
)


@given(PLANS)
def test_a_plan_survives_being_written_down(plan):
    assert Plan.parse(str(plan)) == plan


@given(PLANS)
def test_a_plan_survives_being_saved(tmp_path_factory, plan):
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in path.parent.iterdir()] == ["plan.toml"]


@given(PLANS)
def test_world_size_is_the_product_of_the_axes_and_experts_add_none(plan):
    assert plan.world_size == plan.pp * plan.dp_replicate * plan.dp_shard * plan.cp * plan.tp
    assert plan.dp == plan.dp_replicate * plan.dp_shard


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan(), "microbatch=1,precision=fp32"),
        (Plan(dp_replicate=2, microbatch=4), "dp_replicate=2,microbatch=4,precision=fp32"),
        (Plan(precision="bf16", compile=False), "microbatch=1,precision=bf16,compile=false"),
        (
            Plan(pp=2, tp=4, zero=1, schedule="zbv", reduce="bf16"),
            "pp=2,tp=4,zero=1,schedule=zbv,microbatch=1,precision=fp32,reduce=bf16",
        ),
    ],
)
def test_axes_of_one_are_left_out_and_what_auto_would_choose_is_not(plan, text):
    assert str(plan) == text


@pytest.mark.parametrize(
    "text",
    ["dp_replicate=2, microbatch=4", " dp_replicate = 2 ,microbatch=4,", "microbatch=4,dp_replicate=2"],
)
def test_spaces_order_and_a_last_comma_do_not_matter(text):
    assert Plan.parse(text) == Plan(dp_replicate=2, microbatch=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_replicat=2", "plan: unknown key 'dp_replicat'; did you mean dp_replicate?"),
        ("zzz=2", "plan: unknown key 'zzz'; the keys are: pp, dp_replicate, dp_shard,"),
        ("dp=2", "plan: unknown key 'dp'; did you mean dp_replicate or dp_shard?"),
        ("fsdp=2", "plan: unknown key 'fsdp'; did you mean dp_shard?"),
        ("tp=0", "plan.tp = 0: must be a whole number above 0.\n  Try 1"),
        ("tp=2.5", 'plan.tp = "2.5": must be a whole number above 0.\n  Try 1'),
        ("microbatch=99999999999999999999", "plan.microbatch = 99999999999999999999: numbers of ten digits or more"),
        ("dp_replicate=2,shares=99999999999999999999:1", "plan.shares = 99999999999999999999:1: numbers of ten digits"),
        ("tp=two", 'plan.tp = "two": must be a whole number above 0.\n  Try 1'),
        (
            "precision=fp4",
            'plan.precision = "fp4": must be one of "fp32", "bf16", "fp16", "fp8", "fp8_rowwise", "fp8_blockwise", '
            '"mxfp8".',
        ),
        ("zero=4", "plan.zero = 4: must be a whole number of at least 0 and of at most 3.\n  Try 3"),
        ("schedule=zvb", 'plan.schedule = "zvb": must be one of "gpipe", "1f1b",'),
        ("schedule=zvb", '\n  Try "zbv".'),
        ("tp=0,pp=-1", "plan.pp = -1"),
        ("tp", 'plan = "tp": \'tp\' is neither "auto" nor KEY=VALUE, such as tp=2.'),
        ("tp=2,tp=4", 'plan = "tp=2,tp=4": tp is given twice. Keep one.'),
        ("auto=2", 'plan = "auto=2": auto takes no value. Write "auto".'),
    ],
)
def test_a_plan_that_is_no_plan_is_refused_in_a_sentence(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Plan.parse(text)


def test_words_keep_auto():
    assert words_of("auto,precision=fp32") == {"auto": "", "precision": "fp32"}


@pytest.mark.parametrize(
    ("plan", "global_batch", "microbatches"),
    [("dp_replicate=2,microbatch=4", 16, 2), ("microbatch=16", 16, 1), ("dp_replicate=4,dp_shard=2", 16, 2)],
)
def test_microbatches_cover_the_global_batch(plan, global_batch, microbatches):
    plan = Plan.parse(plan)
    assert plan.microbatches(global_batch) == microbatches
    assert plan.microbatches(global_batch) * plan.dp * plan.microbatch == global_batch


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        ("tp=2", 1),
        ("pp=4", 4),
        ("pp=4,stages_per_rank=3", 4),  # only an interleaved schedule has several
        ("pp=4,schedule=interleaved_1f1b", 8),
        ("pp=4,schedule=interleaved_zero_bubble,stages_per_rank=3", 12),
        ("pp=4,schedule=zbv", 8),
        ("pp=4,schedule=dualpipev,stages_per_rank=5", 8),
    ],
)
def test_stages_are_what_the_schedule_says(plan, stages):
    assert Plan.parse(plan).stages == stages


@pytest.mark.parametrize("schedule", [*SCHEDULES])
@pytest.mark.parametrize(("pp", "per_rank"), [(1, 2), (2, 2), (4, 3)])
def test_every_stage_is_on_one_rank(pp, per_rank, schedule):
    plan = Plan(pp=pp, schedule=schedule, stages_per_rank=per_rank)
    stages = [plan.stages_of(rank) for rank in range(pp)]
    assert sorted(itertools.chain(*stages)) == list(range(plan.stages))
    assert all(mine == sorted(mine) for mine in stages)


def test_in_a_v_the_first_rank_has_both_ends():
    assert [Plan(pp=3, schedule="zbv").stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_planning_starts_without_torch():
    modules = "argosy.plan.search.auto, argosy.plan.workload, argosy.plan.parameters, argosy.plan.cost.exact_state"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_is_read_without_numpy():
    code = "import sys, argosy.plan.plan; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_file_that_would_take_hours_to_read_is_refused(tmp_path):
    (tmp_path / "plan.toml").write_text("a" + ".a" * 200_000 + " = 1\n")
    with pytest.raises(UserError, match="more than 32 names in one key"):
        Plan.load(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("dp_shard=2,zero=3,microbatch=4", "zero=3, and that of a single microbatch is that of the whole batch"),
        ("pp=2,cp=2,microbatch=1", "is not known with a pipeline"),
        ("dp_replicate=2,dp_shard=2,zero=3,microbatch=1,sync=int8", "would be compressed as well"),
        ("dp_replicate=2,microbatch=4,sync=int4", "int4 changes the norm of the sum. Try sync=exact, bf16 or int8"),
        ("dp_replicate=2,microbatch=4,sync=powersgd", "powersgd changes"),
        ("dp_replicate=2,microbatch=4,sync=topk", "topk changes"),
        ("dp_replicate=2,microbatch=4,sync=sign", "sign changes"),
        ("microbatch=8", "one rank with one microbatch"),
        ("pp=2,schedule=zbv,microbatch=1", "zbv splits backward"),
    ],
)
def test_a_plan_under_which_no_rank_has_a_gradient_of_its_own_has_no_noise_scale(plan, message):
    with pytest.raises(UserError, match=message):
        check_can_estimate(run(observe={"noise_scale_every_steps": 1}), Plan.parse(plan))
    check_can_estimate(run(), Plan.parse(plan))


def test_a_noise_scale_that_the_plan_cannot_have_is_refused_when_the_plan_is_chosen():
    asked, one = run(observe={"noise_scale_every_steps": 1}), Devices(1, "cpu", fast_bf16=False)
    with pytest.raises(UserError, match="one rank with one microbatch"):
        choose_plan(asked.model_copy(update={"plan": "microbatch=8"}), one)
    assert choose_plan(asked.model_copy(update={"plan": "microbatch=4"}), one).microbatch == 4
