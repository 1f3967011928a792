"""`benchmarks/planner/rows.py`: what sources say, in the units and with the conventions of each."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

PLANNER = Path(__file__).parents[2] / "benchmarks/planner"
PUBLISHED = PLANNER / "published.csv"


@pytest.fixture(scope="module")
def read():
    """id -> row, of those that are asked for: to fill in what all leave open takes seconds."""
    sys.path.insert(0, str(PLANNER))
    import rows

    with PUBLISHED.open(newline="") as file:
        cells = {cell["id"]: cell for cell in csv.DictReader(file)}
    yield lambda name, **changes: rows.row_of(cells[name] | changes)
    sys.path.remove(str(PLANNER))
    for name in ("rows", "systems"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("name", "tflops"), [("moezoo-001", 245), ("moezoo-002", 276), ("moezoo-004", 200)])
def test_flops_that_a_source_prints_beside_its_step_times_are_those_that_rows_count(read, name, tflops):
    row = read(name)
    counted = read(name, metric="tflops_per_gpu", value=str(tflops))
    assert counted.value == pytest.approx(row.value, rel=0.015)


@pytest.mark.parametrize(("gpu", "peak"), [("MI350X", 2.3e15), ("RTX-4090", 165.2e12), ("V100-32", 125e12)])
def test_shares_of_the_peak_are_of_the_catalogue_s_rate_in_16_bits(read, gpu, peak):
    share = read("titan-001", gpu=gpu, metric="mfu", value="0.4")
    counted = read("titan-001", gpu=gpu, metric="tflops_per_gpu", value=str(0.4 * peak / 1e12))
    assert share.value == pytest.approx(counted.value)


def test_memory_is_in_gib_where_notes_say_so_and_in_gb_elsewhere(read):
    assert read("titan-002").value == pytest.approx(82.4 * 2**30)
    assert read("internevo-055").value == pytest.approx(75e9)


def test_who_let_routers_choose_is_told_from_who_dealt_tokens_out(read):
    assert read("moezoo-006").system.even_experts == 1
    assert read("moezoo-007").system.even_experts == 0


def test_recipes_fill_in_what_rows_leave_empty(read):
    plan = read("tpu-013").plan
    assert (plan.dp_shard, plan.cp, plan.zero, plan.microbatch, plan.recompute) == (64, 4, 3, 1, "full")
    assert read("tpu-013").open == ()
    assert read("tpu-013", tp="2", cp="1", global_batch="256").plan.tp == 2


def test_what_notes_say_of_microbatches_and_compilation_counts(read):
    assert read("internevo-060").batch == 16  # four ranks, micro_num 4
    assert not read("titan-002").plan.compile
    assert read("titan-004").plan.compile
    assert read("titan-028").plan.schedule == "interleaved_1f1b"
