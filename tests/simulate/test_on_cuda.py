"""The step on a GPU that is not there: the host waits for it twice, no tensor is misplaced, and no streams race."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.accelerator import new_stream, on_stream
from argosy.errors import UserError
from argosy.models.layers import RMSNorm
from argosy.parallel.world import World
from argosy.plan.plan import FP8, Plan
from argosy.simulate.device_watch import DeviceWatch
from argosy.simulate.on_cuda import CudaRecord, fake_cuda, step_on_cuda
from tiny import LATENT, LINEAR, run_config

MOE = {"experts": 4, "expert_ffn_width": 16, "shared_experts": 1, "balance": "bias"}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "shallow": {"layers": 1},
    "blocks": {"layers": 1, "width": 128, "ffn_width": 256, "heads": 4, "head_width": 64},
    "deep": {"layers": 4},
    "wide": {"ffn_width": 2048},  # only activations from 64 KiB on are offloaded
    "tied": {"tie_embeddings": True, "attention_bias": True, "qk_norm": True, "kv_heads": 1},
    "experts": {"moe": MOE},
    "losses": {"moe": {**MOE, "balance": "aux", "aux_coefficient": 0.01, "z_coefficient": 1e-3}},
    "capacity": {"moe": {**MOE, "capacity_factor": 1.5}},
    "latent": LATENT,
    "linear": LINEAR,
    "window": {"attention": {"layers": ["sliding", "full"], "window": 16}},
    "softcap": {"attention": {"softcap": 30.0}},
    "sinks": {"attention": {"sinks": True}},
    "mtp": {"mtp": {"modules": 1}},
}
MUON, LION, INT8 = ({"optimizer": keys} for keys in ({"kind": "muon"}, {"kind": "lion"}, {"state": "int8"}))
QUICK: list[tuple[str, str, dict[str, Any]]] = [
    ("capacity", "dp_shard=2,zero=3,precision=bf16,recompute=full", {}),
    ("tied", "pp=2,tp=2,precision=fp16", {}),
]
SLOW: list[tuple[str, str, dict[str, Any]]] = [
    ("dense", "tp=2,precision=bf16,recompute=full,async_tp=true", {}),
    ("window", "cp=2,precision=bf16", {}),
    *((model, "precision=bf16", {}) for model in MODELS),
    ("dense", "precision=fp32", {}),
    *((model, "tp=2,precision=bf16", {}) for model in ("experts", "latent", "linear", "softcap")),
    *((model, "tp=2,precision=bf16,async_tp=true", {}) for model in ("experts", "latent", "linear", "tied")),
    *((model, "cp=2,precision=bf16", {}) for model in ("dense", "softcap", "linear", "sinks")),
    *(("dense", f"dp_shard=2,zero={stage},precision=bf16", {}) for stage in range(4)),
    ("dense", "dp_shard=2,zero=3,precision=bf16,recompute=full,user_buffers=true", {}),
    *(("dense", f"recompute={how},precision=bf16", {}) for how in ("selective", "full")),
    *(("dense", f"dp_replicate=2,precision=bf16,sync={way}", {}) for way in ("bf16", "int8", "int4", "topk", "sign")),
    ("dense", "dp_replicate=2,precision=bf16,sync=powersgd", {}),
    ("dense", "cp=2,context=ulysses,precision=bf16", {}),
    ("dense", "dp_replicate=2,dp_shard=2,zero=3,precision=bf16,weights=bf16", {}),
    ("dense", "dp_replicate=2,dp_shard=2,zero=1,precision=bf16", {}),
    ("wide", "dp_shard=2,zero=2,offload=activations,precision=bf16", {}),
    ("experts", "pp=2,precision=bf16", {}),
    ("mtp", "pp=2,precision=bf16", {}),
    *(("deep", f"pp=2,schedule={kind},precision=bf16", {}) for kind in ("interleaved_1f1b", "zbv", "dualpipev")),
    *(("dense", "precision=bf16", keys) for keys in (MUON, LION, INT8)),
]
LOG, EXCHANGE = "observe/clock.py", "training/step.py"


def on_cuda(model: str, plan: str, **sections: dict[str, Any]) -> CudaRecord:
    layout = Plan.parse(plan)
    rows = layout.dp * layout.pp * (1 if layout.schedule == "1f1b" else 2)
    run = run_config(Path("no data"), model=MODELS[model], train={"global_batch": rows}, **sections)
    return step_on_cuda(layout, run, layout.world_size - 1)


def waits(found: CudaRecord) -> dict[str, int]:
    """File -> waits of the host in a step."""
    counts: dict[str, int] = {}
    for finding in found.host_syncs:
        if finding.part == "step":
            file = finding.where.partition(":")[0]
            counts[file] = counts.get(file, 0) + finding.count
    return counts


@pytest.mark.parametrize(
    ("model", "plan", "sections"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_the_host_waits_twice_in_a_step(model: str, plan: str, sections: dict[str, Any]) -> None:
    found = on_cuda(model, plan, **sections)
    assert waits(found) == {LOG: 1, EXCHANGE: 1}, found
    assert not found.misplaced and not found.races, found


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(("dense", f"tp=2,precision={precision}") for precision in FP8 if precision != "fp8_blockwise"),
        ("blocks", "tp=2,precision=fp8_blockwise"),
        ("experts", "precision=fp8_rowwise"),
        ("experts", "dp_shard=2,zero=3,precision=fp8_rowwise,recompute=full,fp8_gather=true"),
    ],
)
def test_it_waits_no_oftener_in_fp8(model: str, plan: str) -> None:
    if "blockwise" not in plan:
        pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    test_the_host_waits_twice_in_a_step(model, plan, {})


@pytest.mark.parametrize(
    ("model", "plan", "sections", "more"),
    [
        ("experts", "dp_shard=2,ep=2,zero=1,precision=bf16", {}, {"parallel/expert.py": 2}),  # one for each layer
        pytest.param(
            *("experts", "dp_shard=2,ep=2,zero=1,precision=bf16,overlap_experts=true", {}, {"parallel/expert.py": 2}),
            marks=pytest.mark.slow,
        ),
        ("shallow", "dp_replicate=2", {"resilience": {"check_collectives": True}}, {"parallel/model.py": 1}),
        pytest.param("wide", "offload=all,precision=bf16", {}, {"parallel/offload.py": 1}, marks=pytest.mark.slow),
        pytest.param("dense", "dp_shard=2,zero=1", MUON, {"parallel/world.py": 1}, marks=pytest.mark.slow),
        pytest.param(
            "dense",
            "dp_shard=2,zero=1,offload=optimizer",
            MUON,
            {"parallel/world.py": 1, "parallel/offload.py": 1, "optim/optimizer.py": 28},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_waits_oftener_is_known(model: str, plan: str, sections: dict[str, Any], more: dict[str, int]) -> None:
    """docs/before-a-gpu.md names these."""
    found = on_cuda(model, plan, **sections)
    assert waits(found) == {LOG: 1, EXCHANGE: 1, **more}, found
    assert not found.misplaced and not found.races, found


def disturbed(monkeypatch: pytest.MonkeyPatch, how: Callable[[Tensor], object]) -> CudaRecord:
    """A step whose norms do something more with their input."""
    forward = RMSNorm.forward

    def both(norm: RMSNorm, x: Tensor) -> Tensor:
        how(x)
        return forward(norm, x)

    monkeypatch.setattr(RMSNorm, "forward", both)
    return on_cuda("shallow", "precision=bf16")


def wait_in_eight_ways(x: Tensor) -> None:
    x = x.detach()
    float(x.sum()), bool((x > 0).all())
    x.cpu()
    (x > 0).nonzero(), x[x > 0]
    torch.tensor([1.0, 2.0], device=x.device), torch.ones(3).to(x.device, non_blocking=True)
    torch.cuda.synchronize()


def test_a_wait_is_counted_and_its_place_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found, more = disturbed(monkeypatch, wait_in_eight_ways), Counter[str]()
    norms = 3  # two of the layer, and the last
    for finding in found.host_syncs:
        if (finding.part, finding.where.partition(":")[0]) == ("step", "models/decoder.py"):  # what calls the norms
            more[finding.what] += finding.count
    assert more == {
        "a number is read": 2 * norms,
        "a copy to the host": norms,
        "nonzero: how many there are must be known": 2 * norms,
        "a copy out of memory that is not pinned": 2 * norms,
        "the device is waited for": norms,
    }
    assert found.host_syncs_a_step == 2 + more.total()


def test_a_tensor_on_the_wrong_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = disturbed(monkeypatch, lambda x: x + torch.ones(x.shape))
    (finding,) = found.misplaced
    assert "cpu" in finding.what and finding.where.endswith(".py:" + finding.where.rpartition(":")[2])


def test_streams_race_unless_an_event_is_between() -> None:
    def beside(waits: bool) -> DeviceWatch:
        watch = DeviceWatch()
        with fake_cuda(0, 1, watch) as world, watch.counting("test"):
            x, stream = torch.zeros(8, device=world.device), new_stream(world.device)
            if waits:
                stream.wait_stream(torch.accelerator.current_stream(world.device))
            with on_stream(stream):
                x.add_(1)
            if waits:
                torch.accelerator.current_stream(world.device).wait_stream(stream)
            x.mul_(2)
        return watch

    assert not beside(waits=True).races
    assert sum(beside(waits=False).races.values()) == 2


def test_memory_that_another_stream_still_uses_may_not_be_given_away() -> None:
    def freed(tells: bool) -> DeviceWatch:
        watch = DeviceWatch()
        with fake_cuda(0, 1, watch) as world, watch.counting("test"):
            x, stream = torch.zeros(8, device=world.device), new_stream(world.device)
            stream.wait_stream(torch.accelerator.current_stream(world.device))
            with on_stream(stream):
                x.add_(1)
            if tells:
                x.record_stream(stream)
            del x
            torch.zeros(8, device=world.device)
        return watch

    assert not freed(tells=True).races
    assert sum(freed(tells=False).races.values()) == 1


def test_what_is_copied_to_the_host_is_not_there_before_the_device_was_waited_for() -> None:
    def read(waits: bool) -> DeviceWatch:
        watch = DeviceWatch()
        with fake_cuda(0, 1, watch) as world, watch.counting("test"):
            host = torch.zeros(8, device=world.device).to("cpu", non_blocking=True)
            if waits:
                torch.accelerator.synchronize(world.device)
            host.add_(1)
        return watch

    assert not read(waits=True).races
    assert sum(read(waits=False).races.values()) == 1


def test_whole_numbers_on_the_device_keep_their_values() -> None:
    with fake_cuda(1, 2, DeviceWatch()) as world:
        assert isinstance(world, World) and world.device.type == "cuda"
        counts = torch.tensor([3, 1, 2], device=world.device)
        assert counts.cumsum(0).tolist() == [3, 4, 6]
        assert torch.randn(3, device=world.device).sum().item() == 1.0


def test_an_objective_over_answers_is_refused() -> None:
    run = run_config(Path("no data"), train={"objective": "dpo"})
    with pytest.raises(UserError, match=r"train.objective"):
        step_on_cuda(Plan(), run, 0)
