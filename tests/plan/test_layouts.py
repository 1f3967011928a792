"""Plans as columns are the plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from argosy.plan.layouts import Layouts, column_of
from argosy.plan.plan import Plan
from argosy.plan.search.space import crossed, table_of

PLANS = [
    Plan(),
    Plan(pp=4, tp=2, dp_shard=8, zero=1, schedule="interleaved_1f1b", stages_per_rank=3, microbatch=2),
    Plan(pp=2, schedule="zbv", dp_replicate=2, cp=4, context="ulysses", recompute="full", offload="all", compile=False),
    Plan(dp_replicate=2, dp_shard=2, shares="6:2", microbatch=2),
    Plan(pp=2, layers="5:3"),
    Plan(dp_shard=8, ep=8, precision="fp8", weights="bf16", reduce="bf16", recompute="selective", recompute_every=2),
]


def test_a_row_is_the_plan_it_was_made_of():
    columns = Layouts.of(PLANS)
    assert [columns.plan(row) for row in range(len(columns))] == PLANS


@pytest.mark.parametrize(
    "what",
    ["dp", "world_size", "portions", "most_portions", "shares_state", "replicas", "shares_experts", "expert_replicas"],
)
def test_what_follows_from_the_axes(what):
    assert getattr(Layouts.of(PLANS), what).tolist() == [getattr(plan, what) for plan in PLANS]


def test_stages_on_a_rank():
    assert Layouts.of(PLANS).stages_here.tolist() == [plan.stages // plan.pp if plan.pp > 1 else 1 for plan in PLANS]


def test_rows_can_be_chosen():
    columns = Layouts.of(PLANS)
    assert columns[columns.is_("precision", "fp8")].plan(0) == PLANS[-1]
    assert [columns[np.array([2, 0])].plan(i) for i in (0, 1)] == [PLANS[2], PLANS[0]]
    assert len(columns[1:3]) == 2


def test_microbatches_are_those_of_the_rank_that_runs_most():
    assert Layouts.of(PLANS).microbatches(384).tolist() == [plan.microbatches(384) for plan in PLANS]
    assert Plan(dp_replicate=2, dp_shard=2, shares="6:2", microbatch=2).microbatches(16) == 3


def test_the_fullest_rank_is_known_where_layers_are_said():
    assert Layouts.of(PLANS).most_layers.tolist() == [0, 0, 0, 0, 5, 0]
    v_shaped = Plan(pp=2, schedule="zbv", compile=False, layers="3:1:2:2")  # rank 0 has stages 0 and 3
    assert Layouts.of([v_shaped]).most_layers.tolist() == [5]


def test_columns_of_one_value_stay_short_and_an_empty_table_is_empty() -> None:
    pinned = {"zero": column_of("zero", [3])}
    table = crossed(table_of(("tp",), [(1,), (2,)]), table_of(("cp",), [(1,), (4,)]), pinned)
    assert [column.tolist() for column in table.values()] == [[1, 1, 2, 2], [1, 4, 1, 4], [3]]
    assert {len(column) for column in crossed(table_of(("tp",), []), pinned).values()} == {0}
    plans = replace(Layouts.of([Plan(tp=n) for n in (1, 2, 4)]), zero=pinned["zero"])
    some, none = plans[plans.tp > 1], plans[plans.tp > 4]
    assert (len(some), some.tp.tolist(), some.zero.tolist()) == (2, [2, 4], [3])
    assert (len(none), none.zero.tolist()) == (0, [])
    assert some.plan(1) == Plan(tp=4, zero=3)
