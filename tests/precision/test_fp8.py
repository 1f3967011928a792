"""fp8 layers: what is refused, what is converted; the arithmetic by torchao's emulation, where it is installed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from argosy.errors import UserError
from argosy.models.layers import FeedForward
from argosy.plan.parameters import feed_forward_table
from argosy.precision.fp8 import check_fp8, takes_fp8, use_fp8

CUDA = torch.device("cuda", 0)


def pretend(monkeypatch, capability: tuple[int, int], torchao: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object() if torchao else None)


def test_cpu_is_refused():
    with pytest.raises(UserError, match=r"this one is cpu\. Try precision=bf16"):
        check_fp8(torch.device("cpu"))


def test_older_gpu_is_refused_by_name(monkeypatch):
    pretend(monkeypatch, (8, 0), torchao=True)
    with pytest.raises(UserError, match=r"NVIDIA A100 \(compute capability 8\.0\)"):
        check_fp8(CUDA)


def test_missing_package_is_named_with_its_extra(monkeypatch):
    pretend(monkeypatch, (9, 0), torchao=False)
    with pytest.raises(UserError, match=r"argosy\[fp8\]"):
        check_fp8(CUDA)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_newer_gpu_with_the_package_is_taken(monkeypatch, capability):
    pretend(monkeypatch, capability, torchao=True)
    check_fp8(CUDA)


@pytest.mark.parametrize(
    ("name", "module", "taken"),
    [
        ("blocks.0.mlp.up", nn.Linear(32, 64), True),
        ("blocks.0.mlp.up", nn.Linear(32, 60), False),
        ("blocks.0.mlp.up", nn.Linear(30, 64), False),
        ("blocks.0.mlp.router", nn.Linear(32, 64), False),
        ("head", nn.Linear(32, 64), False),
        ("blocks.0.norm", nn.LayerNorm(32), False),
    ],
)
def test_hidden_linear_layers_of_fitting_sizes_take_fp8(name, module, taken):
    assert takes_fp8(module, name) is taken


def test_model_without_such_layers_is_refused():
    with pytest.raises(UserError, match="multiples of 16"):
        use_fp8(nn.Sequential(nn.Linear(3, 5)), torch.device("cpu"), emulate=True)


def test_converted_layers_round_and_keep_their_parameters():
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    layer = FeedForward(feed_forward_table(64, 128))
    before = dict(layer.named_parameters())
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = layer(x).detach()
    use_fp8(layer, torch.device("cpu"), emulate=True)
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert 1e-3 < (y - expected).norm() / expected.norm() < 0.15
    y.sum().backward()
    after = dict(layer.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert all(parameter.grad.dtype == torch.float32 for parameter in after.values())
