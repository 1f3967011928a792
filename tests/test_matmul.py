"""Products of dense layers, by either kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from argosy import matmul
from argosy.matmul import (
    ROWS_MULTIPLE,
    blocks_by_kernel,
    dense,
    dense_by_group,
    fp8_by_block,
    fp8_by_group,
    rows_by_block,
    tiles_in_fp8,
)
from argosy.models.layers import Linear
from argosy.precision import use_fp8

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
WITH_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which oneDNN is asked."""
    monkeypatch.setattr(matmul, "MKL_IS_SLOW", True)


def operands(rows: int = 2 * ROWS_MULTIPLE, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [2, rows / 2, 128], weight [160, 128], bias [160]; 2.6 million multiplications with 128 rows."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, rows // 2, 128), (160, 128), (160,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@WITH_ONEDNN
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("slow")
def test_outputs_and_gradients_are_those_of_torch(compiled: bool) -> None:
    tensors = operands()
    called = torch.compile(dense, backend="aot_eager", fullgraph=True) if compiled else dense
    y, expected = called(*tensors), F.linear(*tensors)
    slopes = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    for got, wanted in zip(
        torch.autograd.grad(y, tensors, slopes), torch.autograd.grad(expected, tensors, slopes), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@WITH_ONEDNN
@pytest.mark.usefixtures("slow")
def test_a_weight_that_is_part_of_wider_rows_is_copied_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands()
    part = torch.cat((weight, weight), 1).detach()[:, :128]
    asked: list[torch.Tensor] = []
    kernel = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *a: asked.append(w) or kernel(x, w, *a))
    torch.testing.assert_close(dense(x, part), F.linear(x, part), rtol=1e-5, atol=1e-4)
    assert asked[0].is_contiguous() and not part.is_contiguous()


@WITH_ONEDNN
@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    "counts", [(3 * ROWS_MULTIPLE + 5, 0, 2 * ROWS_MULTIPLE, 7), (0, 0, 0, 5 * ROWS_MULTIPLE + 12)], ids=str
)
def test_rows_of_groups_are_split_for_onednn(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(s, generator=generator).requires_grad_() for s in ((sum(counts), 128), (4, 160, 128)))
    asked: list[int] = []
    kernel = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *a: asked.append(len(x)) or kernel(x, w, *a)
    )
    y = dense_by_group(x, weights, counts)
    expected = torch.cat([F.linear(*each) for each in zip(x.split(counts), weights, strict=True)])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    slopes = torch.randn(y.shape, generator=generator)
    gradients = (torch.autograd.grad(each, (x, weights), slopes) for each in (y, expected))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    assert asked[0] == max(counts) - max(counts) % ROWS_MULTIPLE and not any(rows % ROWS_MULTIPLE for rows in asked[:2])


@WITH_ONEDNN
@pytest.mark.usefixtures("slow")
def test_flops_are_counted_as_torch_counts_a_product() -> None:
    def flops(product: object) -> int:
        with FlopCounterMode(display=False) as counter:
            product(*operands()[:2]).sum().backward()  # type: ignore[operator]
        return counter.get_total_flops()

    assert flops(dense) == flops(F.linear) > 0


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("rows", "dtype"), [(2 * ROWS_MULTIPLE + 2, torch.float32), (2 * ROWS_MULTIPLE, torch.bfloat16), (2, torch.float32)]
)
def test_rows_of_any_number_other_formats_and_small_ones_are_torch_s(rows: int, dtype: torch.dtype) -> None:
    tensors = operands(rows, dtype)
    assert torch.equal(dense(*tensors), F.linear(*tensors))
    assert not matmul.is_for_onednn(*tensors[:2])


def by_group(counts: tuple[int, ...], spread: float = 1.0) -> list[torch.Tensor]:
    """Rows [N, 64], groups' matrices [G, 48, 64], and a gradient [N, 48]; each row has a magnitude of its own."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((sum(counts), 64), (len(counts), 48, 64), (sum(counts), 48))
    x, weights, slopes = (torch.randn(shape, generator=generator) for shape in shapes)
    x = x * torch.logspace(0, spread, len(x))[:, None]
    return [x.bfloat16().requires_grad_(), weights.requires_grad_(), slopes.bfloat16()]


@pytest.mark.parametrize("counts", [(37, 0, 5, 80), (16, 32), (0, 0), (0, 3)], ids=str)
def test_fp8_rounds_rows_of_groups_and_nothing_else(counts: tuple[int, ...]) -> None:
    x, weights, slopes = by_group(counts, spread=6.0)
    y = fp8_by_group(x, weights, torch.tensor(counts))
    exact = dense_by_group(x.float(), weights, counts)
    assert y.dtype == torch.bfloat16
    assert ((y - exact).norm(dim=1) < 0.06 * exact.norm(dim=1)).all()  # an outlier of a row costs that row alone
    dx, dw = torch.autograd.grad(y, (x, weights), slopes)
    exact_dx, exact_dw = torch.autograd.grad(exact, (x, weights), slopes.float())
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    assert ((dx - exact_dx).norm(dim=1) < 0.06 * exact_dx.norm(dim=1)).all()
    for count, got, wanted in zip(counts, dw, exact_dw, strict=True):
        assert (got - wanted).norm() <= 0.06 * wanted.norm() and bool(got.any()) == (count > 0)


def test_experts_in_fp8_are_rounded_as_dense_layers_are() -> None:
    pytest.importorskip("torchao", reason="the extra fp8 is not installed")
    x, weights, slopes = by_group((48,))
    layer = nn.Sequential(Linear(64, 48, bias=False))
    layer[0].weight.data = weights[0].data
    use_fp8(layer, torch.device("cpu"), "fp8_rowwise", emulate=True)
    y, expected = fp8_by_group(x, weights, torch.tensor([48])), layer(x)
    found = (y, *torch.autograd.grad(y, (x, weights), slopes))
    of_layer = (expected, *torch.autograd.grad(expected, (x, layer[0].weight), slopes))
    for got, wanted in zip(found, of_layer, strict=True):
        assert (got - wanted).norm() < 2e-3 * wanted.norm()  # bf16's rounding; fp8's is 0.04


def test_what_is_not_finite_stays_so_in_fp8() -> None:
    x, weights, _ = by_group((5, 20))
    x.data[7, 3] = torch.inf
    y = fp8_by_group(x, weights, torch.tensor([5, 20]))
    assert y[7].isnan().all() and y[[*range(7), *range(8, 25)]].isfinite().all()
    y[7].sum().backward()
    assert weights.grad[1].isnan().any() and weights.grad[0].isfinite().all()


@pytest.mark.parametrize("rows", [256, 200, 7])
def test_fp8_rounds_blocks_and_an_outlier_costs_its_own_alone(rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, slopes = (torch.randn(shape, generator=generator) for shape in ((rows, 256), (384, 256), (rows, 384)))
    x[3, :128] *= 2.0**20  # beside this the other half of its row would be nothing in fp8
    weight[:128, :128] = 0
    x, weight = x.bfloat16().requires_grad_(), weight.requires_grad_()
    y = fp8_by_block(x[None], weight)[0]
    exact = F.linear(x.float(), weight)
    found = torch.autograd.grad(y, (x, weight), slopes.bfloat16())
    wanted = torch.autograd.grad(exact, (x, weight), slopes.bfloat16().float())
    assert (y.dtype, found[0].dtype, found[1].dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert ((y - exact).norm(dim=1) < 0.06 * exact.norm(dim=1)).all()
    assert (y[3, :128] - exact[3, :128]).norm() < 0.06 * exact[3, :128].norm()
    assert ((found[0] - wanted[0]).norm(dim=1) < 0.06 * wanted[0].norm(dim=1)).all()
    for half in (slice(128), slice(128, None)):
        assert (found[1][:, half] - wanted[1][:, half]).norm() < 0.06 * wanted[1][:, half].norm()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(128, 128, 128), (256, 384, 640)])
def test_torch_takes_blocks_as_they_are_laid_out(rows: int, inputs: int, outputs: int) -> None:
    x, weight, slopes = (
        torch.empty(a, b, device="meta") for a, b in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    of_weight = tiles_in_fp8(weight)
    assert blocks_by_kernel(*rows_by_block(x), *of_weight).shape == slopes.shape
    assert blocks_by_kernel(*rows_by_block(slopes), *tiles_in_fp8(weight.mT)).shape == x.shape
    assert blocks_by_kernel(*rows_by_block(slopes.mT), *rows_by_block(x.mT)).shape == weight.shape
    if TORCH < (2, 14):  # it did look at factors; later ones look on a GPU alone
        with pytest.raises(RuntimeError, match="blockwise scaling"):
            wide = of_weight[1].new_empty(outputs // 128, 1 + inputs // 128 + 4)
            blocks_by_kernel(*rows_by_block(x), of_weight[0], wide)


@pytest.mark.parametrize(
    ("capability", "vendor", "is_slow"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_mkl_is_slow_on_what_has_avx_512_and_is_not_intel_s(
    capability: str, vendor: str, is_slow: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(matmul, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    assert matmul.mkl_is_slow() == is_slow
