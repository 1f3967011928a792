"""An adapter computes what the weight does that it is merged into."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.models.adapters import LowRank, lengths, merged
from argosy.plan.parameters import Parameter

INPUTS, OUTPUTS, RANK, SCALE = 6, 5, 2, 0.5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapter(has_lengths: bool) -> LowRank:
    shapes = {"a": (RANK, INPUTS), "b": (OUTPUTS, RANK)} | ({"magnitude": (OUTPUTS,)} if has_lengths else {})
    table = {name: Parameter(shape) for name, shape in shapes.items()}
    made = LowRank(table, SCALE, None, 0)
    for name, parameter in made.named_parameters():
        parameter.data = drawn(*shapes[name])
    return made


@pytest.mark.parametrize("has_lengths", [False, True])
def test_it_computes_what_the_merged_weight_does(has_lengths: bool) -> None:
    made, weight, x = adapter(has_lengths), drawn(OUTPUTS, INPUTS), drawn(3, INPUTS)
    whole = merged(weight, made.a, made.b, made.magnitude, SCALE)
    assert torch.allclose(made(x, weight), F.linear(x, whole), atol=1e-5)


@pytest.mark.parametrize("has_lengths", [False, True])
def test_before_training_it_changes_nothing(has_lengths: bool) -> None:
    made, weight, x = adapter(has_lengths), drawn(OUTPUTS, INPUTS), drawn(3, INPUTS)
    for parameter in (made.b, *([made.magnitude] if has_lengths else [])):
        parameter.data.zero_()
    assert torch.allclose(made(x, weight), F.linear(x, weight), atol=1e-6)


def test_rows_are_as_long_as_the_magnitude_says() -> None:
    made, weight = adapter(has_lengths=True), drawn(OUTPUTS, INPUTS)
    whole = merged(weight, made.a, made.b, made.magnitude, SCALE)
    assert torch.allclose(whole.norm(dim=-1), (weight.norm(dim=-1) + made.magnitude).abs(), atol=1e-5)


def test_lengths_of_rows_are_computed_without_their_sum() -> None:
    weight, a, b = drawn(OUTPUTS, INPUTS), drawn(RANK, INPUTS), drawn(OUTPUTS, RANK)
    grown, begun = lengths(weight, a, b, SCALE)
    assert torch.allclose(grown, (weight + SCALE * b @ a).norm(dim=-1), atol=1e-5)
    assert torch.allclose(begun, weight.norm(dim=-1), atol=1e-6)


@pytest.mark.parametrize("split", [1, 3])
def test_ranks_with_parts_of_the_inputs_sum_squares(split: int) -> None:
    """What both ranks have is computed alone first; A's inputs are cut like the weight's, its rows are not mixed."""
    weight, a, b = drawn(OUTPUTS, INPUTS), drawn(RANK, INPUTS), drawn(OUTPUTS, RANK)
    squares = torch.zeros(2, OUTPUTS)

    def collect(parts: Tensor) -> Tensor:
        squares.add_(parts)
        return parts

    for columns in (slice(0, split), slice(split, None)):
        lengths(weight[:, columns], a[:, columns], b, SCALE, collect)
    assert torch.allclose(squares.sqrt(), torch.stack(lengths(weight, a, b, SCALE)), atol=1e-5)


def test_a_merged_weight_keeps_its_dtype() -> None:
    made = adapter(has_lengths=True)
    whole = merged(drawn(OUTPUTS, INPUTS).bfloat16(), made.a, made.b, made.magnitude, SCALE)
    assert whole.dtype == torch.bfloat16
