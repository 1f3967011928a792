"""What waits on the host comes back as it was, and is what was to wait there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.parallel.offload import ActivationOffload, HostCopies, offload_activations
from argosy.parallel.recompute import RecomputeMode, apply_recompute
from tiny import model_config

B, T = 4, 32
FP32 = 4
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=[GPU, pytest.mark.gpu])]


@pytest.fixture(autouse=True)
def _each_test_compiles_anew() -> None:
    torch.compiler.reset()


def offloading(
    recompute: RecomputeMode = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    offload: bool = True,
) -> tuple[Decoder, ActivationOffload | None]:
    """The tiny model; always the same weights."""
    model = Decoder(model_config(), dtype)
    materialize(model, model.config, device, seed=0)
    blocks = [(int(i), block) for i, block in model.blocks.items()]
    apply_recompute(blocks, recompute)
    return model, offload_activations(blocks, smallest_bytes=0) if offload else None


def batch(device: torch.device, documents: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    tokens, targets = torch.randint(0, 400, (2, B, T), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(T, device=device).repeat(B, 1)
    for start in range(3, 3 * documents, 3):
        positions[0, start:] = torch.arange(T - start)
    return tokens, targets, positions


def loss_and_gradients(model: Decoder, documents: int = 1) -> list[Tensor]:
    loss = model(*batch(model.device, documents))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_bit_for_bit_those_without(
    recompute: RecomputeMode, dtype: torch.dtype, documents: int, device: torch.device
) -> None:
    model, offload = offloading(recompute, dtype, device)
    expected, _ = offloading("none", dtype, device, offload=False)
    found = loss_and_gradients(model, documents)
    torch.testing.assert_close(found, loss_and_gradients(expected, documents), rtol=0, atol=0)
    assert offload is not None and offload.host_bytes == 0


@pytest.mark.parametrize(
    ("recompute", "backend", "before"),
    [
        ("none", "aot_eager_decomp_partition", True),  # inductor's, but for the kernels
        pytest.param("none", "inductor", True, marks=pytest.mark.slow),
        pytest.param("none", "inductor", False, marks=pytest.mark.slow),
        ("full", "aot_eager", True),
        pytest.param("full", "aot_eager", False, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_are_offloaded_too(recompute: RecomputeMode, backend: str, before: bool) -> None:
    """What is recomputed and what waits is settled before the backend, whose kernels take long to compile."""
    models = []
    for offload in (False, True):
        model, _ = offloading(recompute, offload=False)
        if before:
            _compile(model, backend)
        moved = offload_activations(enumerate(model.blocks.values()), smallest_bytes=0) if offload else None
        if not before:
            _compile(model, backend)
        models.append(model)
    expected, found = (loss_and_gradients(model) for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert moved is not None
    loss = models[1](*batch(models[1].device))
    assert moved.host_bytes > 0
    with torch.compiler.set_stance("fail_on_recompile"):
        loss.backward()


def _compile(model: Decoder, backend: str) -> None:
    for block in model.blocks.values():
        block.compile(backend=backend)


def test_with_full_recomputation_the_input_of_each_block_waits_on_the_host_until_backward() -> None:
    model, offload = offloading("full")
    assert offload is not None
    sizes = model.config
    loss = model(*batch(model.device))
    assert offload.host_bytes == sizes.layers * B * T * sizes.width * FP32
    loss.backward()
    assert offload.host_bytes == 0


class Saves(nn.Module):
    """Saves its input twice, its weight as it is, transposed and cast, and a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64) + 0.1)

    def forward(self, x: Tensor, constant: Tensor) -> Tensor:
        y = F.linear(x, self.weight) + F.linear(x, self.weight.double().float())
        return y * self.weight[0] * constant[0, 0] * x[:, :1].exp()


def test_each_memory_is_copied_once_and_weights_constants_and_small_tensors_stay() -> None:
    block, constant = Saves(), torch.full((64, 64), 2.0)
    expected = copy.deepcopy(block)
    offload = offload_activations([(0, block)], smallest_bytes=64 * 4 + 1)
    results = []
    for saves in (block, expected):
        x = torch.linspace(0, 1, 128 * 64).view(128, 64).requires_grad_()
        y = saves(x * 1, constant)
        if saves is block:
            # The input, the sum of the products and that times the weight's row; the exponential, 128 x 1.
            assert offload.host_bytes == (3 * 128 * 64 + 128) * FP32
        y.sum().backward()
        results.append([y.detach(), x.grad, saves.weight.grad])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


class OverwritesAndSavesAgain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        memory = x.detach().clone()
        y = x * memory
        with torch.no_grad():
            memory.mul_(3)
        return y + x * memory


def test_memory_that_was_overwritten_between_two_saves_is_copied_twice() -> None:
    block = OverwritesAndSavesAgain()
    offload_activations([(0, block)], smallest_bytes=0)
    x = torch.full((8,), 2.0, requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 + 6.0] * 8


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_optimizer_on_the_twins_takes_the_steps_of_one_on_the_parameters(
    dtype: torch.dtype, device: torch.device
) -> None:
    """With bf16 parameters: those of one on fp32 masters, rounded."""
    torch.manual_seed(0)
    start = torch.randn(16, 8)
    target = torch.randn(16, 8)
    parameter = nn.Parameter(start.to(device, dtype, copy=True))
    without_gradient = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
    copies = HostCopies([parameter, without_gradient], dtype=torch.float32)
    optimizer = torch.optim.AdamW(copies.twins, lr=0.1)
    master = nn.Parameter(start.to(dtype).float())
    reference = torch.optim.AdamW([master], lr=0.1)
    for _ in range(5):
        parameter.grad = (parameter.detach().float() - target.to(device)).to(dtype)
        master.grad = (master.detach().to(dtype).float() - target).to(dtype).float()
        copies.grads_to_host()
        parameter.grad = None
        optimizer.step()
        copies.values_to_device()
        reference.step()
    torch.testing.assert_close(copies.twins[0], master.detach(), rtol=0, atol=0, check_device=False)
    torch.testing.assert_close(parameter.detach().cpu(), master.detach().to(dtype), rtol=0, atol=0)
    assert copies.twins[1].grad is None and without_gradient.tolist() == [1.0] * 3
    assert all(twin.device.type == "cpu" and twin.is_pinned() == (device.type == "cuda") for twin in copies.twins)
    assert copies.host_bytes == (2 * parameter.numel() + without_gradient.numel()) * FP32


def test_twins_are_other_memory_with_the_parameters_values() -> None:
    parameter = nn.Parameter(torch.ones(4))
    (twin,) = HostCopies([parameter]).twins
    assert twin.dtype == parameter.dtype and twin.is_leaf and twin.tolist() == [1.0] * 4
    with torch.no_grad():
        parameter.zero_()
    assert twin.tolist() == [1.0] * 4
