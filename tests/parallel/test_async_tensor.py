"""Products that exchange their tokens give the losses and gradients of those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from argosy.errors import UserError
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CommunicationMeter
from argosy.parallel import async_tensor
from argosy.parallel.async_tensor import check_reach
from argosy.parallel.world import World
from tiny import LATENT, LINEAR, eager, gradients, laid_out

ROWS = np.random.default_rng(0).integers(0, 400, (2, 33)).astype(np.int32)
ROWS[0, 9] = ROWS[1, 20:22] = 0
FAMILIES: dict[str, dict[str, Any]] = {
    "biases, norms and gates": {"attention_bias": True, "qk_norm": True, "attention": {"gate": True}},
    "one key/value head": {"kv_heads": 1, "attention_bias": True, "qk_norm": True},
    "no gate": {"family": "nemotron", "ffn_gate": False, "activation": "relu2", "ffn_bias": True},
    "latent": LATENT,
    "linear": LINEAR,
    "shared experts": {"moe": {"experts": 4, "expert_ffn_width": 16, "shared_experts": 1, "balance": "aux"}},
}


@contextmanager
def fused_on_the_cpu() -> Iterator[None]:
    """Let products go through torch's fused operators, which compute on a CPU as torch defines them."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    with mock.patch.object(async_tensor, "is_fused", lambda x: True):
        yield
    library._destroy()


def step(world: World, plan: str, model: dict[str, Any], fused: bool = False) -> tuple[float, dict[str, Tensor], float]:
    """Loss, gradients, and bytes that were sent along tp."""
    parts = laid_out(world, eager(plan), model=model)
    (micro,) = microbatches(ROWS, 2, 0, world.device)
    meter = CommunicationMeter(parts.meshes.axis_of_groups(), lambda rank: 0, world.device)
    with fused_on_the_cpu() if fused else nullcontext(), meter:
        share = parts.forward_backward([micro], 1.0, StepClock(world.device))
    parts.finish_gradients()
    return share.item(), gradients(parts), meter.lap()["tp"]["node"][1]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_loss_gradients_and_bytes_sent_are_those_without(workers, family):
    """One after the other, and as torch's operators."""
    plain = workers.run(2, step, "tp=2,microbatch=2", family)
    found = [
        rank
        for fused in (False, True)
        for rank in workers.run(2, step, "tp=2,microbatch=2,async_tp=true", family, fused)
    ]
    for (loss, mine, sent), (expected_loss, expected, its_bytes) in zip(found, 2 * plain, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert sent == its_bytes > 0
        assert mine.keys() == expected.keys()
        for name, gradient in mine.items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


@pytest.mark.parametrize("here", [8, 4, 2])
def test_ranks_on_gpus_of_several_machines_cannot_read_each_other_s_memory(here, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    check_reach(World(0, 8), 4)
    with pytest.raises(UserError, match="this machine has 2 of them") if here == 2 else nullcontext():
        check_reach(World(0, 8, torch.device("cuda")), 4)
