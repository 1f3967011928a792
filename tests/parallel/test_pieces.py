"""However a parameter is split, what a rank holds is a box of the whole, and knows which.

Norm and clipping of gradients are those of torch on the whole model.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from argosy.parallel.pieces import clip, square_share, unscale
from argosy.parallel.world import World
from tiny import decoder, eager, laid_out

MODEL = {"vocab_size": 403, "qk_norm": True, "family": "qwen3", "attention_bias": True}
DEEP = MODEL | {"layers": 4}
"""For pipelines of two ranks with two stages each."""
TIED = DEEP | {"tie_embeddings": True}
PLANS = [
    "",
    "dp_shard=4,zero=1",
    "dp_shard=4",
    "dp_replicate=2,dp_shard=2",
    "tp=2,dp_shard=2,zero=1",
    "tp=2,dp_shard=2",
    "tp=2,cp=2",
]
SLOW = ["dp_replicate=4", "dp_shard=4,zero=0", "dp_replicate=2,dp_shard=2,zero=2", "tp=4"]
PIPELINES = ["pp=2,tp=2", "pp=2,dp_shard=2,zero=1", "pp=2,dp_shard=2,schedule=zbv"]


def holdings(world: World, plan: str, model: dict) -> dict[str, tuple[np.ndarray, int, bool, bool, bool]]:
    """Return for each piece: its elements' places in the whole, copies; do value, gather and offset agree with it?"""
    whole = {name: weight.detach() for name, weight in decoder(**model).named_parameters()}
    found = {}
    for piece in laid_out(world, eager(plan), model=model).pieces:
        places = piece.scatter(torch.arange(whole[piece.name].numel()).view(piece.shape))
        box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.value.shape, strict=True))
        found[piece.name] = (
            places.flatten().numpy(),
            piece.replicas,
            torch.equal(piece.value, piece.scatter(whole[piece.name])),
            torch.equal(piece.gather(piece.value), whole[piece.name]),
            torch.equal(piece.value, whole[piece.name][box]),
        )
    return found


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        *((plan, MODEL) for plan in PLANS),
        # What is tied is on several ranks of a pipeline alone.
        *((plan, TIED) for plan in PIPELINES),
        *(pytest.param(plan, MODEL, marks=pytest.mark.slow) for plan in SLOW),
        *(pytest.param(plan, DEEP, marks=pytest.mark.slow) for plan in PIPELINES),
        *(pytest.param(plan, TIED, marks=pytest.mark.slow) for plan in (*PLANS, *SLOW)),
    ],
    ids=lambda value: value if isinstance(value, str) else "tied" if value is TIED else "untied",
)
def test_the_boxes_of_all_ranks_are_the_whole_as_often_as_they_say(workers, plan, model):
    by_rank = workers.run(eager(plan).world_size, holdings, plan, model)
    for name, weight in decoder(**model).named_parameters():
        mine = [found[name] for found in by_rank if name in found]
        (copies,) = {one[1] for one in mine}
        held = np.bincount(np.concatenate([one[0] for one in mine]), minlength=weight.numel())
        assert (held == copies).all(), name
        assert all(all(one[2:]) for one in mine), name


def cut_dims(world: World, plan: str) -> dict[str, tuple[frozenset[int], bool, bool]]:
    model = laid_out(world, eager(plan), model=MODEL)
    return {p.name: (p.cut, p.is_part_of_sum, p.is_expert) for p in model.pieces}


def test_a_piece_says_along_which_dims_it_is_cut(workers):
    for found in workers.run(4, cut_dims, "tp=2,dp_shard=2"):
        assert {name: cut for name, (cut, *_) in found.items() if name.startswith("blocks.1.")} == {
            "blocks.1.attention_norm.weight": {0},
            "blocks.1.attention.q.weight": {0},
            "blocks.1.attention.q.bias": {0},
            "blocks.1.attention.k.weight": {0},
            "blocks.1.attention.k.bias": {0},
            "blocks.1.attention.v.weight": {0},
            "blocks.1.attention.v.bias": {0},
            "blocks.1.attention.o.weight": {0, 1},
            "blocks.1.attention.o.bias": {0},
            "blocks.1.attention.q_norm.weight": {0},
            "blocks.1.attention.k_norm.weight": {0},
            "blocks.1.mlp_norm.weight": {0},
            "blocks.1.mlp.gate.weight": {0},
            "blocks.1.mlp.up.weight": {0},
            "blocks.1.mlp.down.weight": {0, 1},
        }
        part_of_sum = {re.sub(r"^blocks\.\d+\.", "", name) for name, (_, part, _) in found.items() if part}
        norms = {"attention_norm.weight", "mlp_norm.weight", "attention.q_norm.weight", "attention.k_norm.weight"}
        assert part_of_sum == norms | {"attention.o.bias", "norm.weight"}
        assert not any(expert for _, _, expert in found.values())


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """A gradient of the whole parameter."""
    seed = sum(name.encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CLIPS = [(0.5, 1.0), (0.5, 256.0), (1e6, 1.0), (0.0, 256.0)]
"""The largest norm that is left alone, 0 for any, and the scale of the loss."""


def clipped(world: World, plan: str, model: dict) -> list[tuple[float, dict[str, Tensor]]]:
    """Return for each of `CLIPS` the norm, and the gradients once they are clipped."""
    pieces, found = laid_out(world, eager(plan), model=model).pieces, []
    for max_norm, scale in CLIPS:
        for piece in pieces:
            piece.value.grad = piece.scatter(drawn(piece.name, piece.shape)) * scale
        unscale(pieces, scale)
        norm = world.sum(square_share(pieces)).sqrt().item()
        clip(pieces, max_norm, norm)
        found.append((norm, {piece.name: piece.gather(piece.value.grad) for piece in pieces}))
    return found


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "dp_shard=4",
        "tp=2,dp_shard=2,zero=1",
        pytest.param("pp=2,tp=2", marks=pytest.mark.slow),
        "dp_shard=2,zero=0,pp=2",
    ],
)
def test_clipping_is_that_of_torch_on_the_whole_model(workers, plan):
    """Each parameter counts once, the embedding that both ends of a pipeline hold and what all replicas hold too."""
    reference, found = decoder(**TIED), workers.run(eager(plan).world_size, clipped, plan, TIED)
    for case, (max_norm, _) in enumerate(CLIPS):
        for name, parameter in reference.named_parameters():
            parameter.grad = drawn(name, parameter.shape)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm or float("inf")).item()
        for norm, gradients in (of_rank[case] for of_rank in found):
            assert norm == pytest.approx(expected, rel=1e-5)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-7, msg=name)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    pieces = laid_out(World(), eager("weights=bf16"), model=TIED).pieces
    for piece in pieces:
        piece.value.grad = drawn(piece.name, piece.shape).bfloat16()
    squares = sum(piece.value.grad.double().square().sum().item() for piece in pieces)
    assert square_share(pieces).item() == pytest.approx(squares, rel=1e-6)
