"""However a parameter is split, what a rank holds is a box of the whole, and knows which."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from argosy.parallel.world import World
from tiny import decoder, eager, laid_out

MODEL = {"vocab_size": 403, "layers": 4, "qk_norm": True, "family": "qwen3", "attention_bias": True}
TIED = MODEL | {"tie_embeddings": True}
PLANS = [
    "",
    "dp_replicate=4",
    "dp_shard=4,zero=0",
    "dp_shard=4,zero=1",
    "dp_shard=4",
    "dp_replicate=2,dp_shard=2,zero=2",
    "dp_replicate=2,dp_shard=2",
    "tp=4",
    "tp=2,dp_shard=2,zero=1",
    "tp=2,dp_shard=2",
    "tp=2,cp=2",
    "pp=2,tp=2",
    "pp=2,dp_shard=2,zero=1",
    "pp=2,dp_shard=2,schedule=zbv",
]


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


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("plan", PLANS)
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
