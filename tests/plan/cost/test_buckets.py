"""The size of buckets: what is left to wait for after backward, and the size that leaves least."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.config.schema import RunConfig
from argosy.plan.cost.cost_model import CostModel
from argosy.plan.cost.step_time import LEAST_BUCKET_GAIN, SIZES_MB, wait_s
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.layouts import Layouts
from argosy.plan.plan import Plan
from argosy.plan.search.search import search


def run_of(batch: int = 1024) -> RunConfig:
    model = {"layers": 16, "width": 2048, "heads": 16, "kv_heads": 8, "head_width": 128, "ffn_width": 8192}
    return RunConfig.model_validate(
        {"model": model, "data": {"seq_len": 4096}, "train": {"steps": 10, "global_batch": batch}}
    )


def played_out(gradients: float, bucket: float, start: float, of_byte: float, backward: float) -> float:
    """The same by following each bucket."""
    many = int(gradients // bucket)
    done = 0.0
    for number in range(1, many + 1):
        done = max(done, backward * number / many) + start + bucket * of_byte
    return done - backward


@pytest.mark.parametrize("bucket", [1.0, 4.0, 16.0, 64.0])
@pytest.mark.parametrize(("start", "of_byte"), [(0.0, 0.001), (0.05, 0.001), (0.5, 0.001), (0.0, 0.1), (0.2, 0.1)])
def test_the_wait_is_that_of_buckets_that_follow_each_other(bucket, start, of_byte):
    assert wait_s(64.0, bucket, start, of_byte, 5.0) == pytest.approx(played_out(64.0, bucket, start, of_byte, 5.0))


def best(cluster: str, plan: str, run: RunConfig | None = None) -> int:
    costs = CostModel.of(run or run_of(), Cluster.parse(cluster))
    return costs.with_buckets(Layouts.of([Plan.parse(plan)])).plan(0).bucket_mb


def test_the_more_ranks_a_message_passes_the_larger_it_is():
    sizes = [best(f"{n}xh100", f"dp_shard={n},zero=1,precision=bf16", run_of(128)) for n in (8, 32, 128)]
    assert sizes == sorted(set(sizes)) and sizes[0] > Plan().bucket_mb


@pytest.mark.parametrize("plan", ["dp_replicate=64,zero=0", "dp_shard=64,zero=1", "dp_replicate=64,sum_inside=8"])
def test_no_other_size_is_predicted_faster(plan):
    costs = CostModel.of(run_of(), Cluster.parse("64xh100"))
    sizes = Layouts.of([Plan.parse(f"{plan},precision=bf16,bucket_mb={size}") for size in SIZES_MB])
    chosen = costs.predict_time(costs.with_buckets(sizes)).total
    assert np.all(chosen <= np.min(costs.predict_time(sizes).total) * (1 + LEAST_BUCKET_GAIN))


def test_where_size_hardly_matters_it_is_the_usual_one():
    assert best("8xcpu", "dp_shard=8,zero=1") == Plan().bucket_mb
    assert best("8xh100", "tp=8") == Plan().bucket_mb
    assert best("64xh100", "dp_shard=64,zero=3") == Plan().bucket_mb, "FSDP2 has messages of its own"


def test_a_search_chooses_it_unless_it_is_pinned():
    costs = CostModel.of(run_of(), Cluster.parse("32xh100"))
    pins = {"dp_shard": (32,), "zero": (1,)}
    assert set(search(costs, pins).plans.bucket_mb) - {Plan().bucket_mb}
    assert set(search(costs, {**pins, "bucket_mb": (2,)}).plans.bucket_mb) == {2}


def test_tiers_are_predicted_to_pay_where_a_ring_is_long_and_messages_are_small():
    costs = CostModel.of(run_of(), Cluster.parse("256xh100"))
    plans = [Plan.parse(f"dp_replicate=256,precision=bf16,bucket_mb=4,sum_inside={n}") for n in (1, 8)]
    plain, tiers = costs.predict_time(Layouts.of(plans)).total
    assert tiers < plain
