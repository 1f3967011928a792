"""Compressed sums go with every other axis: losses stay near those of exact sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.parallel.world import World
from tiny import eager, losses, run_config, train_in

MIXTURE = {"moe": {"experts": 4, "expert_ffn_width": 32}}


def trained(world: World, corpus: Path, run_dir: Path, plan: str, model: dict[str, Any]) -> list[float]:
    run = run_config(
        corpus, model=model, sync={"min_elements": 64, "block": 32}, evaluate={"every_steps": 0}, train={"steps": 4}
    )
    return losses(train_in(world, run, eager(plan), run_dir))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("dp_replicate=2,tp=2,microbatch=4", {"kv_heads": 1}),
        ("dp_replicate=2,pp=2,microbatch=2", {"tie_embeddings": True}),
        ("pp=2,dp_replicate=2,schedule=zbv,microbatch=2", {"layers": 4}),
        ("dp_replicate=2,cp=2,zero=2,microbatch=4", {}),
        ("cp=2,zero=0,microbatch=4", {}),
        ("dp_replicate=2,dp_shard=2,ep=2,zero=2", MIXTURE),
        ("dp_replicate=2,dp_shard=2,ep=2,zero=3", MIXTURE),
        ("dp_replicate=2,pp=2,dp_shard=2,zero=3", {}),
        ("dp_replicate=4,tp=2,microbatch=2,sum_inside=2", {}),
        ("dp_replicate=4,pp=2,sum_inside=2", {"tie_embeddings": True}),
        ("dp_replicate=2,cp=2,zero=0,microbatch=4,sum_inside=2", {}),
        ("dp_replicate=4,dp_shard=2,ep=2,zero=2,sum_inside=2", MIXTURE),
        ("dp_replicate=4,dp_shard=2,ep=2,zero=3,sum_inside=2", MIXTURE),
        ("dp_replicate=8,sum_inside=2,sum_between=2", {}),
        ("dp_replicate=4,sum_inside=2,precision=fp16", {}),
        ("dp_replicate=2,precision=fp16", {}),
        ("dp_replicate=2,reduce=bf16,weights=bf16", {}),
        ("dp_replicate=2,offload=optimizer", {}),
    ],
)
@pytest.mark.parametrize("word", ["int8", "powersgd"])
def test_compressed_sums_go_with_every_axis(workers, corpus, tmp_path, plan, model, word):
    size = eager(plan).world_size
    exact = workers.run(size, trained, corpus, tmp_path / "exact", plan, model)[0]
    found = workers.run(size, trained, corpus, tmp_path / word, f"{plan},sync={word}", model)[0]
    assert found == pytest.approx(exact, rel=2e-3 if word == "int8" else 0.1)
