"""A bit that differs between replicas is seen by all ranks, tensor and rank are named, and it is healed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from argosy.config.optimizer import OptimizerConfig
from argosy.models.layers import local
from argosy.optim.optimizer import Optimizer
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.training.fingerprint import Corruption, Fingerprints
from tiny import eager, flip, laid_out

EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 32, "balance": "bias"}}
TENSOR = "blocks.1.mlp.up.weight"


def trained(world: World, plan: str, model: dict[str, Any], kind: str = "adamw", state: str = "fp32") -> Fingerprints:
    """The fingerprints of a model after an optimizer step with made-up gradients."""
    return fingerprints_of(laid_out(world, eager(plan), model=model), world, kind, state)


def fingerprints_of(parallel: ParallelModel, world: World, kind: str = "adamw", state: str = "fp32") -> Fingerprints:
    optimizer = Optimizer(parallel.masters, OptimizerConfig.model_validate({"kind": kind, "state": state}))
    for piece in parallel.pieces:
        piece.value.grad = torch.full_like(piece.value, 0.5)
    parallel.before_update()
    optimizer.step()
    parallel.after_update()
    parallel.settle()  # as the next forward does
    outer = {piece.name: {"weights": piece.value.detach().clone()} for piece in parallel.masters}
    return Fingerprints(parallel, optimizer, world, outer.__getitem__)


PLANS = [
    ("dp_replicate=3", {}),
    ("dp_shard=2,zero=0", {}),
    pytest.param("dp_shard=2,zero=1", {}, marks=pytest.mark.slow),
    ("dp_replicate=2,dp_shard=2,zero=2", {}),
    pytest.param("dp_replicate=2,dp_shard=2", {}, marks=pytest.mark.slow),
    ("tp=2,dp_replicate=2", {}),
    ("tp=2,dp_shard=2,zero=1", {}),
    pytest.param("tp=2,dp_shard=2", {}, marks=pytest.mark.slow),
    ("pp=2,dp_replicate=2", {}),
    ("pp=2,dp_replicate=2", {"tie_embeddings": True}),
    ("cp=2,dp_replicate=2,zero=0", {}),
    ("dp_shard=2,ep=2,dp_replicate=2", EXPERTS),
    pytest.param("dp_shard=4,ep=2,zero=1", EXPERTS, marks=pytest.mark.slow),
    ("dp_replicate=2,offload=optimizer", {}),
    ("dp_replicate=2,weights=bf16", {}),
]


def compared(world: World, plan: str, model: dict[str, Any], kind: str, state: str) -> dict[str, Any]:
    """What the fingerprints of a healthy state say, and of one with a bit flipped on the last rank."""
    fingerprints = trained(world, plan, model, kind, state)
    healthy = (fingerprints.differ(), fingerprints.find())
    found: dict[str, Any] = {"healthy": healthy, "shares": fingerprints.share() is not None, "flipped": []}
    names = [replica.name for replica in fingerprints.replicas()]
    found["replicas"] = {replica.name: len(replica.holders.ranks) for replica in fingerprints.replicas()}
    for prefix in ("model", "optimizer", "master", "outer"):
        name = next((name for name in names if name.startswith(prefix)), None)
        if name is None:
            continue
        tensor = next(replica.tensor for replica in fingerprints.replicas() if replica.name == name)
        if world.rank == world.size - 1:
            flip(tensor, tensor.numel() - 1, 8 * tensor.element_size() - 1)
        found["flipped"].append((name, fingerprints.differ(), fingerprints.find()))
        if world.rank == world.size - 1:
            flip(tensor, tensor.numel() - 1, 8 * tensor.element_size() - 1)
    return found


@pytest.mark.parametrize(("plan", "model"), PLANS)
def test_healthy_replicas_are_equal_and_a_flipped_sign_is_found_under_any_layout(workers, plan, model):
    size = eager(plan).world_size
    by_rank = workers.run(size, compared, plan, model, "adamw", "fp32")
    sick = [name for name, _, _ in by_rank[-1]["flipped"]]
    assert sick
    for found in by_rank:
        assert found["healthy"] == (False, []) and found["shares"]
        for name, (_, differ, corruptions) in zip(sick, found["flipped"], strict=True):
            assert differ
            assert [c.name for c in corruptions] == [name] and size - 1 in corruptions[0].ranks


@pytest.mark.parametrize(("kind", "state"), [("adamw", "int8"), ("lion", "fp32"), ("muon", "fp32")])
def test_so_is_the_state_of_any_optimizer(workers, kind, state):
    for found in workers.run(3, compared, "dp_replicate=3", {}, kind, state):
        assert found["healthy"] == (False, [])
        assert any(name.startswith("optimizer") and differ for name, differ, _ in found["flipped"])


def test_all_that_replicas_hold_is_compared(workers):
    (found, *_) = workers.run(2, compared, "dp_shard=2,zero=1", {}, "adamw", "fp32")
    assert set(found["replicas"]) == {f"model.{name}" for name in _names()}  # each has its own moments
    (found, *_) = workers.run(3, compared, "dp_replicate=3", {}, "adamw", "fp32")
    parts = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq", "outer.{}.weights")
    assert found["replicas"] == {part.format(name): 3 for name in _names() for part in parts}


def _names() -> list[str]:
    return [piece.name for piece in laid_out(World(), eager("")).pieces]


def nothing_to_compare(world: World, plan: str) -> bool:
    fingerprints = trained(world, plan, {})
    return fingerprints.share() is None and not fingerprints.differ()


@pytest.mark.parametrize("plan", ["", "dp_shard=2", "pp=2"])
def test_what_one_rank_alone_holds_cannot_be_compared(workers, plan):
    assert all(workers.run(eager(plan).world_size, nothing_to_compare, plan))


def healed(world: World, plan: str, sick: list[tuple[int, str, int, int]]) -> tuple[list[Corruption], bool, bool]:
    """Flip bits (rank, tensor, index, bit), find and heal them.

    Returns what was found, whether replicas still differ, and whether they are as before.
    """
    fingerprints = trained(world, plan, {})
    before = {replica.name: replica.tensor.clone() for replica in fingerprints.replicas()}
    for rank, name, index, bit in sick:
        if world.rank == rank:
            flip(next(replica.tensor for replica in fingerprints.replicas() if replica.name == name), index, bit)
    assert fingerprints.differ()
    found = fingerprints.find()
    if all(corrupt.healthy is not None for corrupt in found):
        fingerprints.heal(found)
    same = all(torch.equal(before[replica.name], replica.tensor) for replica in fingerprints.replicas())
    return found, fingerprints.differ(), same


@pytest.mark.parametrize(
    ("rank", "bit"),
    [
        pytest.param(rank, bit, marks=() if place == rank else pytest.mark.slow)
        for rank in range(3)
        for place, bit in enumerate((0, 23, 31))
    ],
)
@pytest.mark.parametrize("name", [f"model.{TENSOR}", f"optimizer.{TENSOR}.exp_avg_sq"])
def test_one_of_three_is_blamed_and_healed(workers, rank, bit, name):
    for found, differ, same in workers.run(3, healed, "dp_replicate=3", [(rank, name, 17, bit)]):
        assert [(c.name, c.ranks, c.healthy) for c in found] == [(name, (rank,), 0 if rank else 1)]
        assert not differ and same


def test_several_tensors_of_several_ranks_are_healed_at_once(workers):
    sick = [(1, f"model.{TENSOR}", 3, 30), (2, "model.norm.weight", 0, 1), (1, f"optimizer.{TENSOR}.exp_avg", 3, 30)]
    for found, differ, same in workers.run(4, healed, "dp_replicate=4", sick):
        assert {(c.name, c.ranks) for c in found} == {(name, (rank,)) for rank, name, _, _ in sick}
        assert not differ and same


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2,zero=1"])
def test_of_two_neither_is_trusted(workers, plan):
    for found, differ, _ in workers.run(2, healed, plan, [(1, f"model.{TENSOR}", 5, 12)]):
        assert [(c.name, c.ranks, c.healthy) for c in found] == [(f"model.{TENSOR}", (0, 1), None)]
        assert differ


def moved(world: World, plan: str) -> bool:
    """True if a bit of the first tensor that this rank shares is in the rank's own memory, not in a copy of it."""
    parallel = laid_out(world, eager(plan))
    tensors = {replica.name: replica.tensor for replica in fingerprints_of(parallel, world).replicas()}
    pieces = {f"model.{p.name}": local(p.parameter) for p in parallel.pieces}
    return all(tensors[name].data_ptr() == pieces[name].data_ptr() for name in tensors if name in pieces)


def test_what_is_compared_and_healed_is_the_live_memory(workers):
    assert all(workers.run(4, moved, "dp_replicate=2,dp_shard=2,zero=2"))
