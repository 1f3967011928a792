"""What a run freezes keeps its values, and the rest trains as in a plain loop, however the model is laid out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from argosy.config.optimizer import is_frozen
from argosy.models.microbatch import microbatches
from argosy.parallel.world import World
from tiny import decoder, eager, losses, made_step, plain_adamw, run_config, train_in, train_step, whole_parameters
from workers import WorkerPool

STEPS, LR = 3, 1e-2
ROWS = np.random.default_rng(0).integers(0, 400, (8, 33)).astype(np.int32)
FROZEN: dict[str, tuple[str, ...]] = {
    "bottom": ("embedding", "blocks.0", "blocks.1"),  # with pp=2, all of the first stage
    "top": ("blocks.3", "norm", "head"),
    "some": ("embedding", "*.attention.q.*", "*.mlp.down.*", "blocks.2.*_norm"),
    "all but one": ("embedding", "blocks.*", "head"),
}
EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16, "aux_coefficient": 0.1}}
PLANS = [
    ("bottom", "microbatch=8"),
    ("top", "microbatch=2"),
    ("all but one", "microbatch=8"),
    *(("some", f"dp_shard=2,zero={stage}") for stage in (0, 2, 3)),
    ("bottom", "dp_shard=2,zero=3,microbatch=2"),
    ("some", "tp=2"),
    ("bottom", "pp=2"),
]
SLOW = [
    ("bottom", "dp_shard=2,zero=1"),
    ("bottom", "pp=2,dp_shard=2,zero=3"),
    ("some", "dp_shard=2,zero=1"),
    ("all but one", "dp_shard=2,zero=3"),
    ("top", "dp_shard=2,dp_replicate=2,zero=2"),
    ("top", "tp=2,dp_shard=2,zero=3"),
    ("bottom", "tp=2"),
    ("all but one", "tp=2"),
    ("some", "cp=2"),
    ("bottom", "cp=2,context=ulysses"),
    ("top", "pp=2"),
    *(
        (name, f"pp=2,schedule={schedule}")
        for name in ("bottom", "some")
        for schedule in ("gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
    ),
    ("some", "dp_shard=2,recompute=full"),
    ("bottom", "dp_shard=2,zero=3,recompute=selective"),
    ("some", "dp_shard=2,offload=all"),
    ("some", "dp_replicate=4,sum_inside=2"),
]


def settings(frozen: str, **model: Any) -> dict[str, dict[str, Any]]:
    return {"model": {"layers": 4, **model}, "train": {"frozen": FROZEN[frozen]}, "optimizer": {"eps": 1e-6}}


def trained(world: World, plan: str, sections: dict[str, dict[str, Any]]) -> tuple[list[float], dict[str, np.ndarray]]:
    """Loss and norm of some steps on ROWS, and this rank's parameters after them, whole."""
    layout, said = eager(plan), []
    step = train_step(world, layout, **sections)
    model = step.state.model
    rows = ROWS[layout.rows_of(model.dp_rank, len(ROWS))]
    for _ in range(STEPS):
        said += made_step(step, microbatches(rows, layout.microbatch, 0, world.device), LR)
    return said, whole_parameters(model)


def plain(frozen: str, **config: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in a loop of torch's own."""
    model, said = decoder(layers=4, **config), []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name, FROZEN[frozen]))
    left = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = plain_adamw(model, LR)
    (batch,) = microbatches(ROWS, len(ROWS), 0, torch.device("cpu"))
    for _ in range(STEPS):
        loss = model(batch.tokens_BT, batch.targets_BT, batch.positions_BT) / batch.targets_BT.numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(left, 1.0)
        adam.step()
        adam.zero_grad()
        said += [loss.item(), norm.item()]
    return said, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("frozen", "plan"), [*PLANS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)], ids=str
)
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_rest_trains_as_in_a_plain_loop(workers: WorkerPool, frozen: str, plan: str, tied: bool) -> None:
    said, weights = plain(frozen, tie_embeddings=tied)
    first = decoder(layers=4, tie_embeddings=tied).state_dict()
    ranks = workers.run(eager(plan).world_size, trained, plan, settings(frozen, tie_embeddings=tied))
    seen = set()
    for theirs, parts in ranks:
        assert theirs == pytest.approx(said, rel=1e-4)
        for name, found in parts.items():
            torch.testing.assert_close(torch.from_numpy(found), weights[name], rtol=1e-3, atol=2e-5)
            if is_frozen(name, FROZEN[frozen]):
                assert torch.equal(torch.from_numpy(found), first[name])
            seen.add(name)
    assert seen == set(weights)


@pytest.mark.parametrize("plan", ["dp_shard=2,zero=1", pytest.param("pp=2", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_bit_for_bit(workers: WorkerPool, corpus: Path, tmp_path: Path, plan: str) -> None:
    run = run_config(corpus, train={"frozen": FROZEN["some"][:2]})
    whole, *_ = workers.run(2, train_in, run, eager(plan), tmp_path / "whole")
    workers.run(2, train_in, run, eager(plan), tmp_path / "stopped", 3)
    again, *_ = workers.run(2, train_in, run, eager(plan), tmp_path / "stopped")
    assert losses(again) == losses(whole)
    whole_files, stopped_files = (
        {path.name: path.read_bytes() for path in (tmp_path / kind).glob("checkpoints/step-*8/rank-*.safetensors")}
        for kind in ("whole", "stopped")
    )
    assert len(whole_files) == 2
    assert whole_files == stopped_files


def test_what_is_trained_later_begins_with_a_fresh_optimizer(corpus: Path, tmp_path: Path) -> None:
    some = run_config(corpus, train={"frozen": ("embedding", "blocks.0"), "steps": 4}, evaluate={"every_steps": 0})
    train_in(World(), some, eager("microbatch=8"), tmp_path)
    every = some.model_copy(update={"train": some.train.model_copy(update={"frozen": (), "steps": 8})})
    said = losses(train_in(World(), every, eager("microbatch=8"), tmp_path))
    assert len(said) == 8
    (folder,) = tmp_path.glob("checkpoints/step-*8")
    with safe_open(next(folder.glob("rank-*.safetensors")), "pt") as file:
        steps = {name: int(file.get_tensor(f"optimizer.{name}.step")) for name in ("embedding.weight", "norm.weight")}
    assert steps == {"embedding.weight": 4, "norm.weight": 8}


def test_frozen_experts_and_router_stay(workers: WorkerPool) -> None:
    sections = settings("some", **EXPERTS, family="mixtral")
    sections["train"] = {"frozen": ("blocks.0.mlp.router", "*.mlp.experts")}
    _, whole = trained(World(), "microbatch=8", sections)
    for _, parts in workers.run(2, trained, "dp_shard=2,ep=2,zero=3", sections):
        for name, found in parts.items():
            np.testing.assert_allclose(found, whole[name], rtol=1e-3, atol=2e-5)
