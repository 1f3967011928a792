"""Norms by layer: those of one process under every layout, and nothing of what is trained changes for them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from argosy.models.microbatch import microbatches
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.services.norms import LayerNorms, layer_of
from tiny import eager, run_config, train_in, train_step

END = 0
ROWS = np.random.default_rng(0).integers(0, 400, (8, 33)).astype(np.int32)
DENSE = {"layers": 4, "tie_embeddings": True}
EXPERTS = {
    "layers": 2, "family": "mixtral",
    "moe": {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 16, "aux_coefficient": 0.1},
}  # fmt: skip
Norms = dict[str, dict[str, float]]


def measured(world: World, plan: str, model: dict, optimizer: dict | None = None) -> tuple[Norms, float]:
    """The norms of the second step on ROWS, and the gradient's global norm."""
    layout, sections = eager(plan), {"model": model, "optimizer": optimizer or {}}
    train = train_step(world, layout, **sections)
    share = len(ROWS) // layout.dp
    rows = ROWS[train.state.model.dp_rank * share : (train.state.model.dp_rank + 1) * share]
    norms = LayerNorms(run_config(Path("no data"), **sections), train.state.model, world)
    for step in range(2):
        batch = microbatches(rows, layout.microbatch, END, world.device)
        outcome = train.exchange(train.forward_backward(batch))
        train.apply(train.update(outcome, 1e-2), norms if step else None)
    found = norms.line(1)
    assert norms.line(0) == {}
    return found["norms"], outcome.gradient_norm


def by_hand(model: dict) -> Norms:
    """The same in one process, from whole tensors before and after."""
    train = train_step(World(), Plan(compile=False, microbatch=8), model=model)
    for _ in range(2):
        (batch,) = microbatches(ROWS, len(ROWS), END, torch.device("cpu"))
        outcome = train.exchange(train.forward_backward([batch]))
        before = {p.name: p.value.clone() for p in train.state.model.pieces}
        gradients = {p.name: p.value.grad.clone() for p in train.state.model.pieces}
        train.apply(train.update(outcome, 1e-2))
    squares: dict[str, dict[str, float]] = {}
    for piece in train.state.model.pieces:
        layer = squares.setdefault(layer_of(piece.name), {"weight": 0.0, "gradient": 0.0, "update": 0.0})
        layer["weight"] += before[piece.name].double().square().sum().item()
        layer["gradient"] += gradients[piece.name].double().square().sum().item()
        layer["update"] += (piece.value - before[piece.name]).double().square().sum().item()
    return {name: {kind: math.sqrt(value) for kind, value in layer.items()} for name, layer in squares.items()}


def assert_equal(found: Norms, expected: Norms, rel: float = 2e-4) -> None:
    assert found.keys() == expected.keys()
    for layer, norms in expected.items():
        assert found[layer] == pytest.approx(norms, rel=rel), layer


@pytest.fixture(scope="module")
def dense() -> Norms:
    return by_hand(DENSE)


@pytest.fixture(scope="module")
def experts() -> Norms:
    return by_hand(EXPERTS)


@pytest.mark.parametrize(
    "plan",
    [
        "microbatch=8",
        "dp_replicate=2,microbatch=2",
        "dp_shard=2,zero=1,microbatch=2",
        "dp_shard=2,zero=3,microbatch=2",
        "tp=2,microbatch=4",
        "pp=2,microbatch=2",
        pytest.param("pp=2,tp=2,microbatch=2", marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,dp_shard=2,microbatch=2", marks=pytest.mark.slow),
        "cp=2,microbatch=4",
    ],
)
def test_every_layout_has_the_norms_of_one_process(workers, dense, plan):
    for found, gradient_norm in workers.run(Plan.parse(plan).world_size, measured, plan, DENSE):
        assert_equal(found, dense)
        total = math.sqrt(sum(layer["gradient"] ** 2 for layer in found.values()))
        assert total == pytest.approx(gradient_norm, rel=1e-5)


@pytest.mark.parametrize("plan", ["microbatch=8", "dp_shard=2,ep=2,microbatch=4", "tp=2,microbatch=4"])
def test_every_layout_has_the_norms_of_one_process_with_experts(workers, experts, plan):
    for found, _ in workers.run(Plan.parse(plan).world_size, measured, plan, EXPERTS):
        assert_equal(found, experts)


def test_the_norms_of_an_optimizer_on_the_host_are_there_too(dense):
    assert_equal(measured(World(), "microbatch=8,offload=optimizer", DENSE)[0], dense)


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        pytest.param(
            f"microbatch=4{weights}",
            optimizer,
            # Weights in bf16 have masters in fp32, whatever the optimizer.
            marks=pytest.mark.slow if weights and optimizer["kind"] != "adamw" else (),
        )
        for weights in ("", ",weights=bf16")
        for optimizer in (
            {"kind": "adamw"},
            {"kind": "adamw", "state": "int8"},
            {"kind": "lion"},
            {"kind": "muon"},
        )
    ],
    ids=str,
)
def test_weights_are_the_same_to_a_bit_with_norms_and_without(tmp_path, corpus, optimizer, plan):
    told = {}
    for every in (0, 1):
        run = run_config(corpus, optimizer=optimizer, observe={"norms_every_steps": every}, train={"steps": 4})
        told[every] = train_in(World(), run, eager(plan), tmp_path / str(every))
    for without, with_norms in zip(told[0], told[1], strict=True):
        assert "norms" not in without
        if "loss" in without:
            assert with_norms["norms"].keys() == {"embedding", "0", "1", "norm", "head"}
        for key in ("loss", "grad_norm", "validation_loss"):
            assert without.get(key) == with_norms.get(key)


def test_norms_are_measured_in_the_steps_that_are_due(tmp_path, corpus):
    run = run_config(corpus, observe={"norms_every_steps": 3}, train={"steps": 8})
    lines = train_in(World(), run, eager("microbatch=8"), tmp_path)
    assert [line["step"] for line in lines if "norms" in line] == [2, 5]
