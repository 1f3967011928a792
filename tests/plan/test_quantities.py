"""Shares deal every row of a batch to exactly one rank, in order."""

from __future__ import annotations

import pytest

from argosy.errors import UserError
from argosy.plan.plan import Plan
from argosy.plan.quantities import evenly, factorizations, ratio_of


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ("dp_replicate=2", [12, 12]),
        ("dp_replicate=2,shares=3:1", [18, 6]),
        ("dp_replicate=2,shares=6:2,microbatch=2", [18, 6]),
        ("dp_replicate=2,dp_shard=2,shares=2:1", [8, 8, 4, 4]),
        ("dp_shard=4,zero=1,shares=2:1", [8, 8, 4, 4]),
        ("dp_shard=4,zero=1,shares=1:2:2:1", [4, 8, 8, 4]),
        ("", [24]),
    ],
)
def test_each_row_is_one_ranks_and_in_order(plan, rows):
    layout = Plan.parse(plan)
    slices = [layout.rows_of(rank, 24) for rank in range(layout.dp)]
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(24))
    assert [part.stop - part.start for part in slices] == rows
    assert max(layout.microbatches_of(rank, 24) for rank in range(layout.dp)) == layout.microbatches(24)
    assert sum(layout.shares_of_ranks) == layout.portions


def test_a_ratio_is_written_in_lowest_terms_and_not_at_all_if_even():
    assert [ratio_of(numbers) for numbers in [(6, 2), (6, 6, 2, 2), (5, 3), (4, 4), (7,)]] == [
        "3:1",
        "3:1",
        "5:3",
        "",
        "",
    ]


@pytest.mark.parametrize("word", ["3:0", "3:", "a:b", "1.5:1", "3;1"])
def test_what_is_no_ratio_is_refused(word):
    with pytest.raises(UserError, match=r"plan\.shares"):
        Plan.parse(f"dp_replicate=2,shares={word}")


def test_a_plan_with_shares_survives_text_and_file(tmp_path):
    plan = Plan.parse("dp_replicate=2,shares=3:1")
    plan.save(tmp_path / "plan.toml")
    assert Plan.parse(str(plan)) == plan == Plan.load(tmp_path / "plan.toml")
    assert "shares" not in str(Plan.parse("dp_replicate=2"))


def test_factorizations_are_all_ordered_products():
    assert sorted(factorizations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    assert len(factorizations(64, 3)) == 28


@pytest.mark.parametrize(
    ("most", "kept"), [(0, []), (1, [0]), (2, [0, 9]), (4, [0, 3, 6, 9]), (10, [*range(10)]), (20, [*range(10)])]
)
def test_items_are_taken_evenly_from_the_first_to_the_last(most: int, kept: list[int]) -> None:
    assert evenly(range(10), most) == kept
