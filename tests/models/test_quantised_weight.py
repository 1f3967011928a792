"""Quantised matrices have the numbers of NF4 and int8 in blocks, however they are cut; backward keeps no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from argosy.config.train import LoraConfig
from argosy.models.quantised_weight import INT8_STEPS, NF4, QuantisationScheme, QuantisedWeight

BASES = ("nf4", "int8")


def scheme(base: str, columns: int, first: int = 0, whole: int = 0, ranks: int = 1) -> QuantisationScheme:
    lora = LoraConfig.model_validate({"rank": 1, "base": base})
    made = QuantisationScheme(lora, columns, first, whole or columns, ranks)
    made.to(torch.device("cpu"))
    return made


def drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def by_definition(numbers: Tensor, base: str) -> Tensor:
    """Each number's nearest, block by block, in fp64; the codes are those of bitsandbytes 0.50.2, bit for bit."""
    levels = (
        torch.tensor(NF4, dtype=torch.float64)
        if base == "nf4"
        else torch.arange(-INT8_STEPS, INT8_STEPS + 1) / INT8_STEPS
    )
    found = []
    for block in numbers.split(64, -1):
        scale = block.abs().amax(-1, keepdim=True)
        distance = (block.double() / scale.double()).unsqueeze(-1) - levels
        found.append(levels[distance.abs().argmin(-1)] * scale)
    return torch.cat(found, -1).float()


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("columns", [256, 100])
def test_each_number_is_the_nearest(base: str, columns: int) -> None:
    numbers = drawn(40, columns)
    how = scheme(base, columns)
    quantised = how.quantise(numbers)
    assert quantised.shape == (40, -(-columns // 64) * (36 if base == "nf4" else 68))
    back = how.dequantise(quantised, torch.float32)
    torch.testing.assert_close(back, by_definition(numbers, base), rtol=1e-6, atol=1e-7)
    assert torch.equal(how.quantise(back), quantised)
    assert not how.dequantise(how.quantise(torch.zeros(2, columns)), torch.float32).any()


@pytest.mark.parametrize("base", BASES)
def test_what_lies_between_is_small_on_a_cpu(base: str) -> None:
    """A matrix of fp32 beside each quantised one would take what quantising saves."""
    how = scheme(base, 1024)
    quantised = how.quantise(drawn(2048, 1024))

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            storages[made.untyped_storage().data_ptr()] = made.untyped_storage()
            return made

    storages: dict[int, torch.UntypedStorage] = {}
    with Made():
        whole = how.dequantise(quantised, torch.float32)
    known = (whole.untyped_storage().data_ptr(), quantised.untyped_storage().data_ptr())
    between = [storage.nbytes() for place, storage in storages.items() if place not in known]
    # 4 bytes of each of the numbers that are in a quarter of a million bytes, which codes of 4 bits have two of.
    assert 0 < max(between) <= 2 * 4 * 2**18 < whole.nbytes
    assert torch.equal(whole, torch.cat([how.dequantise(rows, torch.float32) for rows in quantised.split(64)]))


def test_codes_lie_as_those_of_bitsandbytes() -> None:
    # quantize_4bit(x, blocksize=64, quant_type="nf4") of these numbers: the first of two in the upper half.
    numbers = torch.tensor([-1.0, 1.0, 0.0, 0.5, -0.3, 0.09] + 58 * [0.0])[None] * 3
    quantised = scheme("nf4", 64).quantise(numbers)[0]
    assert quantised[:4].clone().view(torch.float32).item() == 3.0
    assert quantised[4:8].tolist() == [0x0F, 0x7C, 0x48, 0x77]


@pytest.mark.parametrize("base", BASES)
def test_parts_have_the_numbers_of_the_whole(base: str) -> None:
    numbers = drawn(8, 256)
    whole = scheme(base, 256).dequantise(scheme(base, 256).quantise(numbers), torch.float32)
    for first in (0, 128):
        part = scheme(base, 128, first, 256, ranks=2)
        assert torch.equal(
            part.dequantise(part.quantise(numbers[:, first : first + 128]), torch.float32), whole[:, first:][:, :128]
        )
    assert torch.equal(scheme(base, 256).quantise(numbers)[3:], scheme(base, 256).quantise(numbers[3:]))
    read = QuantisedWeight(torch.zeros_like(scheme(base, 256).quantise(numbers)), scheme(base, 256))
    read.read(lambda first, count: numbers[first : first + count])
    assert torch.equal(read.float(), whole)


@pytest.mark.parametrize(("base", "compiled"), [("nf4", False), ("int8", False), ("nf4", True)])
def test_backward_keeps_the_bytes_alone(base: str, compiled: bool) -> None:
    numbers, how = drawn(48, 128), scheme(base, 128)
    weight = QuantisedWeight(how.quantise(numbers), how)
    inputs = drawn(5, 128).requires_grad_()

    def outputs(x: Tensor) -> Tensor:
        return weight.times(x, F.linear).sin()

    if compiled:  # min-cut partitioning, as before inductor's own code
        outputs = torch.compile(outputs, backend="aot_eager_decomp_partition", fullgraph=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = outputs(inputs)
    found.sum().backward()
    assert any(tensor.dtype == torch.uint8 for tensor in kept)
    assert not any(tensor.is_floating_point() and tensor.numel() >= numbers.numel() for tensor in kept)
    plain = inputs.detach().clone().requires_grad_()
    wanted = F.linear(plain, weight.float()).sin()
    wanted.sum().backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(inputs.grad, plain.grad)
