"""Each family on a GPU: drawn models have the numbers there that they have on the CPU, eager and compiled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from argosy.parallel.world import World
from argosy.plan.plan import Plan
from drawn_families import DRAWN, draw_config, random_model
from families_in_worlds import errors, under_plan
from family_cards import save_theirs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's numbers with the CPU's"),
]
ROUNDING = {"logits": 1e-4, "gradients": 1e-3, "losses": 1e-3}
"""The largest difference that another order of fp32's sums makes, relative as `errors` has it."""
COMPILED = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "mixtral", "llama4_text")
"""Families whose blocks differ: windows and capped scores, sinks, latent attention, linear layers, experts, chunks."""


@pytest.mark.parametrize("family", sorted(DRAWN))
def test_a_gpu_computes_what_the_cpu_does(family: str, tmp_path: Path):
    compare(family, "microbatch=2,compile=false", tmp_path)


@pytest.mark.parametrize("family", COMPILED)
def test_what_is_compiled_for_a_gpu_computes_it_too(family: str, tmp_path: Path):
    compare(family, "microbatch=2", tmp_path)


def compare(family: str, plan: str, folder: Path) -> None:
    """Train a drawn model on the CPU, eagerly, and on the GPU by `plan`, and compare."""
    save_theirs(family, random_model(draw_config(family, random.Random(family).choice)), folder)
    expected = under_plan(World(), folder, Plan.parse("microbatch=2,compile=false"))
    found = under_plan(World(device=torch.device("cuda:0")), folder, Plan.parse(plan))
    logits, gradients = found["logits"], found["gradients"]
    on_host = {
        "logits": (logits[0], logits[1].cpu()),
        "gradients": {name: value.cpu() for name, value in gradients.items()},
        "losses": found["losses"],
    }
    off = errors([on_host], {**expected, "logits": expected["logits"][1]})
    assert all(off[name] <= ROUNDING[name] for name in ROUNDING), off
