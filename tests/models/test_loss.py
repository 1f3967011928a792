"""The chunked loss is F.cross_entropy, without ever holding all logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode  # there is no public way to see every tensor made

from argosy.models import loss
from argosy.models.loss import chunk_loss_and_gradient, summed_cross_entropy
from argosy.simulate.fake import LiveBytes

TOKENS, WIDTH, VOCAB = 61, 16, 50


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    targets[::7] = -100
    return x, weight, targets


def reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x.float() @ weight.T, targets, ignore_index=-100, reduction="sum")


@pytest.fixture(params=[1, 7, 20, 61, 1000], ids="rows={}".format)
def chunk_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(loss, "CHUNK_LOGITS", request.param * VOCAB)
    monkeypatch.setattr(loss, "LEAST_CHUNK_ROWS", {"cpu": 1})
    rows: int = request.param
    return rows


@pytest.mark.usefixtures("chunk_rows")
def test_value_and_gradients_are_those_of_cross_entropy():
    x, weight, targets = inputs()
    ours, theirs = summed_cross_entropy(x, weight, targets), reference(x, weight, targets)
    assert ours.dtype == torch.float32 and ours.shape == ()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours / 8, (x, weight)), torch.autograd.grad(theirs / 8, (x, weight)))


@pytest.mark.usefixtures("chunk_rows")
def test_without_gradients_the_value_is_the_same():
    x, weight, targets = inputs()
    with torch.no_grad():
        torch.testing.assert_close(summed_cross_entropy(x, weight, targets), reference(x, weight, targets))
    with torch.inference_mode():
        torch.testing.assert_close(summed_cross_entropy(x, weight, targets), reference(x, weight, targets))


@pytest.mark.usefixtures("chunk_rows")
def test_bf16_activations_stay_close_and_the_weight_keeps_fp32_gradients():
    x, weight, targets = inputs(torch.bfloat16)
    ours, theirs = summed_cross_entropy(x, weight, targets), reference(x, weight, targets)
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0)
    (grad_x, grad_weight), expected = (torch.autograd.grad(y, (x, weight)) for y in (ours, theirs))
    assert grad_x.dtype == torch.bfloat16 and grad_weight.dtype == torch.float32
    for mine, exact in zip((grad_x, grad_weight), expected, strict=True):
        assert (mine.float() - exact.float()).norm() < 0.02 * exact.float().norm()


def test_when_no_target_counts_loss_and_gradients_are_zero():
    x, weight, targets = inputs()
    value = summed_cross_entropy(x, weight, torch.full_like(targets, -100))
    grads = torch.autograd.grad(value, (x, weight))
    assert value == 0 and all((g == 0).all() for g in grads)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    x, weight, targets = inputs()
    x = (x * 1000).detach().requires_grad_()
    ours, theirs = summed_cross_entropy(x, weight, targets), reference(x, weight, targets)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_gives_its_loss_in_fp32_and_the_gradient_to_its_logits_in_theirs(dtype):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, VOCAB, generator=generator).to(dtype).requires_grad_()
    targets = torch.tensor([0, VOCAB - 1, -100, 3, 3, 4, -100, 7, 8])
    expected = F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
    loss, gradient = chunk_loss_and_gradient(logits.detach(), targets)
    assert loss.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(loss.sum(), expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


@pytest.mark.usefixtures("chunk_rows")
@pytest.mark.parametrize("grad", [True, False])
def test_each_chunk_goes_once_through_the_loss_that_is_given(grad):
    x, weight, targets = inputs()
    seen: list[Tensor] = []

    def doubled(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(targets_C)
        loss, gradient_CV = chunk_loss_and_gradient(logits_CV, targets_C)
        return 2 * loss, 2 * gradient_CV

    with torch.set_grad_enabled(grad):
        ours, theirs = summed_cross_entropy(x, weight, targets, doubled), 2 * reference(x, weight, targets)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(torch.cat(seen), targets)
    if grad:
        torch.testing.assert_close(torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(theirs, (x, weight)))


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation gave."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("train", [True, False])
def test_the_full_logits_never_exist(train, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 4096)
    monkeypatch.setattr(loss, "LEAST_CHUNK_ROWS", {"cpu": 16})
    x, weight = torch.randn(2048, 4, requires_grad=train), torch.randn(256, 4, requires_grad=train)
    with LargestTensor() as largest:
        value = summed_cross_entropy(x, weight, torch.zeros(2048, dtype=torch.int64))
        if train:
            value.backward()
    assert 0 < largest.elements <= 2048 * 4  # no more than the input; all logits would be 2048 * 256


def test_a_chunk_leaves_nothing_beside_the_next_but_the_sums_of_gradients(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 64 * 512)
    monkeypatch.setattr(loss, "LEAST_CHUNK_ROWS", {"cpu": 1})
    weight, most = torch.randn(512, 64, requires_grad=True), {}
    for chunks in (1, 3):
        x = torch.randn(64 * chunks, 64, dtype=torch.bfloat16, requires_grad=True)
        with LiveBytes() as live:
            summed_cross_entropy(x, weight, torch.zeros(len(x), dtype=torch.int64))
        most[chunks] = live.most
    of_weight, of_inputs, of_tokens = 4 * weight.numel(), 2 * 2 * 64 * 64, 4 * 8 * 64
    assert most[3] - most[1] <= of_weight + of_inputs + of_tokens


def test_a_frozen_head_takes_fewer_tokens_at_once():
    weight = torch.empty(128_256, 2048, device="meta")
    assert loss.rows_at_once(weight, 0) < loss.rows_at_once(weight.requires_grad_(), 0)
