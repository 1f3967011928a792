"""From a plan to a model that is laid out: with the same weights under any plan, and only here is asked for axes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import argosy
from argosy.parallel.world import World
from tiny import decoder, eager, laid_out

EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16}}


def whole_weights(world: World, plan: str, model: dict) -> dict[str, Tensor]:
    """The whole of each parameter that this rank has a part of."""
    parallel = laid_out(world, eager(plan), model=model)
    return {piece.name: piece.gather(piece.value).clone() for piece in parallel.pieces}


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("tp=2,dp_shard=2", {}),
        ("tp=2,dp_shard=2,zero=1", {}),
        ("pp=2,cp=2", {}),
        ("dp_shard=4,ep=2", EXPERTS),
        ("tp=2,dp_shard=2,ep=2,zero=2", EXPERTS),
    ],
)
def test_a_model_begins_with_the_same_weights_under_any_plan(workers, plan, model):
    expected = {name: parameter.detach() for name, parameter in decoder(**model).named_parameters()}
    found = workers.run(4, whole_weights, plan, model)
    assert set().union(*found) == set(expected)
    for weights in found:
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("plan", ["", "zero=1", "recompute=full,offload=activations"])
def test_the_parameters_of_a_single_process_are_plain_tensors(plan):
    model = laid_out(World(), eager(plan), model=EXPERTS)
    assert not any(isinstance(piece.parameter, DTensor) for piece in model.pieces)
    assert all(piece.replicas == 1 and piece.mesh is None and not piece.cut for piece in model.pieces)


@pytest.mark.parametrize("room", ["training/step.py", "training/state.py", "training/loop.py", "optim", "checkpoint"])
def test_the_step_the_optimizer_and_the_checkpoint_do_not_ask_which_axes_are_used(room):
    place = Path(argosy.__file__).parent / room
    for file in [place] if place.is_file() else sorted(place.glob("*.py")):
        asked = re.findall(r"plan\.(?:pp|tp|cp|ep|dp_shard|dp_replicate|zero|shards_parameters)\b", file.read_text())
        assert not asked, f"{file} asks for {asked}"
