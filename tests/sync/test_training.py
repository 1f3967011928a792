"""Runs whose replicas agree in fewer bytes learn, resume to the bit, and take their residuals to other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint import store
from argosy.checkpoint.load import boxes_in, load_into
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSED
from argosy.training.state import TrainState
from argosy.training.sync_memory import SavedSyncState, SyncMemory
from tiny import eager, laid_out, losses, run_config, train_in, weights

SMALL = {"min_elements": 64, "block": 32, "density": 0.05, "rank": 2}
MESHES = (
    "dp_replicate=2,sync={}",
    "dp_replicate=2,dp_shard=2,zero=2,sync={}",
    "dp_replicate=2,dp_shard=2,zero=3,sync={}",
    "dp_replicate=4,sum_inside=2,sync={}",
)


def trained(
    world: World, corpus: Path, run_dir: Path, plan: str, stop_after: int | None = None, steps: int = 5
) -> list[float]:
    run = run_config(corpus, sync=SMALL, train={"steps": steps}, evaluate={"every_steps": 0})
    return losses(train_in(world, run, eager(plan), run_dir, stop_after))


def two_steps(world: World, corpus: Path, run_dir: Path, plan: str) -> list[float]:
    """Leave a checkpoint with residuals."""
    return trained(world, corpus, run_dir, plan, steps=2)


def words_and_meshes(words: Sequence[str], meshes: int, quick: set[tuple[str, int]]) -> list[Any]:
    slow = pytest.mark.slow
    return [
        pytest.param(word, MESHES[i], marks=() if (word, i) in quick else slow) for word in words for i in range(meshes)
    ]


@pytest.mark.parametrize(("word", "mesh"), words_and_meshes(COMPRESSED, 2, {("int8", 0), ("topk", 0)}))
def test_a_compressed_run_stays_near_the_exact_one(workers, corpus, tmp_path, mesh, word):
    size = eager(mesh.format(word)).world_size
    exact = workers.run(size, trained, corpus, tmp_path / "exact", mesh.format("exact"))[0]
    found = workers.run(size, trained, corpus, tmp_path / word, mesh.format(word))[0]
    assert found[0] == pytest.approx(exact[0], rel=1e-6), "the first loss is before any sum"
    assert found[-1] < found[0]
    close = {"bf16": 1e-3, "int8": 1e-3, "int4": 1e-2}
    if word in close:
        assert found == pytest.approx(exact, rel=close[word])
        assert found != exact


@pytest.mark.slow
@pytest.mark.parametrize("word", ["int8", "powersgd"])
def test_uneven_shares_are_compressed_as_even_ones(workers, corpus, tmp_path, word):
    even, uneven = (
        workers.run(2, trained, corpus, tmp_path / f"{shares}", f"dp_replicate=2,sync={word},shares={shares}")[0]
        for shares in ("", "3:1")
    )
    assert uneven == pytest.approx(even, rel=1e-3 if word == "int8" else 2e-2)
    assert uneven != even


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bf16", "powersgd"])
def test_zero_3_sums_over_replicas_what_zero_2_sums(workers, corpus, tmp_path, word):
    two, three = (
        workers.run(4, trained, corpus, tmp_path / f"{zero}", f"dp_replicate=2,dp_shard=2,zero={zero},sync={word}")[0]
        for zero in (2, 3)
    )
    assert three == pytest.approx(two, rel=2e-3 if word != "powersgd" else 2e-2)


@pytest.mark.parametrize(("word", "mesh"), words_and_meshes(["int4", "powersgd", "sign"], 4, {("powersgd", 3)}))
def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(workers, corpus, tmp_path, mesh, word):
    plan = mesh.format(word)
    size = eager(plan).world_size
    whole = workers.run(size, trained, corpus, tmp_path / "whole", plan)[0]
    workers.run(size, trained, corpus, tmp_path / "cut", plan, 3)
    assert workers.run(size, trained, corpus, tmp_path / "cut", plan)[0] == whole
    ours, theirs = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def residuals(world: World, corpus: Path, run_dir: Path, plan: str) -> dict[str, torch.Tensor]:
    """What a rank under `plan` takes for each parameter from the newest checkpoint."""
    chosen = store.newest_whole(run_dir)
    assert chosen is not None
    run, layout = run_config(corpus, sync=SMALL), eager(plan)
    state = TrainState.begin(laid_out(world, layout, sync=SMALL), layout, run)
    boxes = state.boxes(SavedSyncState.of(boxes_in(chosen.checkpoint)))
    load_into(boxes, chosen.checkpoint)
    state.restored(boxes)
    return {
        box.name.split(".", 3)[3]: tensor.clone()
        for box, tensor in SyncMemory(state.model).boxes().items()
        if box.name.startswith("sync.residual.")
    }


@pytest.mark.parametrize(("before", "after"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_residuals_move_to_other_numbers_of_replicas_and_add_up_to_the_same(workers, corpus, tmp_path, before, after):
    workers.run(before, two_steps, corpus, tmp_path, f"dp_replicate={before},sync=int4")
    totals = []
    for size in (before, after):
        found = workers.run(size, residuals, corpus, tmp_path, f"dp_replicate={size},sync=int4")
        totals.append({name: sum(rank[name] for rank in found) for name in found[0]})
    assert totals[0].keys() == totals[1].keys()
    for name, total in totals[0].items():
        assert total.any()
        torch.testing.assert_close(totals[1][name], total)


@pytest.mark.parametrize("mesh", MESHES[-1:])
def test_in_tiers_a_group_of_replicas_has_one_residual_a_part_on_each(workers, corpus, tmp_path, mesh):
    """It is read as that of a replica where each has its own, and the other way round."""
    workers.run(4, two_steps, corpus, tmp_path, mesh.format("int4"))
    parts = workers.run(4, residuals, corpus, tmp_path, mesh.format("int4"))
    whole = workers.run(2, residuals, corpus, tmp_path, "dp_replicate=2,sync=int4")
    assert whole[0]
    for name, found in whole[1].items():
        assert torch.equal(torch.cat([parts[2][name], parts[3][name]]), found), name
        assert found.any(), name
    workers.run(2, two_steps, corpus, tmp_path / "at once", "dp_replicate=2,sync=int4")
    whole = workers.run(2, residuals, corpus, tmp_path / "at once", "dp_replicate=2,sync=int4")
    parts = workers.run(4, residuals, corpus, tmp_path / "at once", mesh.format("int4"))
    for name, found in whole[0].items():
        assert torch.equal(torch.cat([parts[0][name], parts[1][name]]), found), name


def test_residuals_move_to_other_cuts(workers, corpus, tmp_path):
    workers.run(2, two_steps, corpus, tmp_path, "dp_replicate=2,sync=int4")
    whole = workers.run(2, residuals, corpus, tmp_path, "dp_replicate=2,sync=int4")
    cut = workers.run(4, residuals, corpus, tmp_path, "dp_replicate=2,dp_shard=2,zero=2,sync=int4")
    for name, found in whole[1].items():
        assert torch.equal(torch.cat([cut[2][name], cut[3][name]]), found), name


def test_an_exact_plan_keeps_nothing(workers):
    assert workers.run(2, kept) == [0, 0]


def kept(world: World) -> int:
    return len(SyncMemory(laid_out(world, Plan(dp_replicate=2, compile=False))).boxes())
