"""Weights with an adapter merged into them, read whole and by boxes; other weights than its own are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy.checkpoint.adapter import MergedWeights, find_weights
from argosy.config.train import LoraConfig
from argosy.errors import UserError
from argosy.models.lazy_weights import HeldWeights
from argosy.plan.parameters import adapter_of

LORA = LoraConfig(rank=2, alpha=8.0)
PLAIN, LINEAR, STACK = "norm.weight", "blocks.0.attention.q.weight", "blocks.0.mlp.experts.up"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHTS = {PLAIN: drawn(6), LINEAR: drawn(6, 4), STACK: drawn(3, 6, 4)}
ADAPTER = {
    f"{adapter_of(LINEAR)}.a": drawn(2, 4), f"{adapter_of(LINEAR)}.b": drawn(6, 2),
    f"{adapter_of(STACK)}.a": drawn(3, 2, 4), f"{adapter_of(STACK)}.b": drawn(3, 6, 2),
}  # fmt: skip


def whole(name: str) -> torch.Tensor:
    """W + (alpha / rank) B A (Hu et al. 2021)."""
    if name == PLAIN:
        return WEIGHTS[name]
    a, b = (ADAPTER[f"{adapter_of(name)}.{part}"] for part in "ab")
    return WEIGHTS[name] + 4.0 * b @ a


def merged(dtype: torch.dtype | None = None, kept: torch.dtype = torch.float32) -> MergedWeights:
    held = HeldWeights({name: weight.to(kept) for name, weight in WEIGHTS.items()})
    return MergedWeights(held, HeldWeights(ADAPTER), LORA, dtype)


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_adapter_is_added_to_the_weight_that_it_stands_beside(name: str) -> None:
    found = merged()
    torch.testing.assert_close(found[name], whole(name))
    assert found.shape(name) == tuple(WEIGHTS[name].shape)


@pytest.mark.parametrize(
    ("name", "offset", "shape"),
    [(PLAIN, (2,), (3,)), (LINEAR, (1, 2), (4, 2)), (LINEAR, (0, 0), (6, 4)), (STACK, (1, 2, 1), (2, 3, 2))],
)
def test_a_box_is_that_of_the_whole(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    box = tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))
    torch.testing.assert_close(merged().part(name, offset, shape), whole(name)[box])


def test_lengths_of_dora_are_those_that_were_trained() -> None:
    grown = drawn(6) / 10
    adapter = {**ADAPTER, f"{adapter_of(LINEAR)}.magnitude": grown}
    found = MergedWeights(HeldWeights(WEIGHTS), HeldWeights(adapter), LORA, None)
    lengths = found[LINEAR].norm(dim=-1)
    torch.testing.assert_close(lengths, WEIGHTS[LINEAR].norm(dim=-1) + grown)
    torch.testing.assert_close(found.part(LINEAR, (3, 0), (2, 4)), found[LINEAR][3:5])


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_the_dtype_is_the_weights_own_or_the_one_that_is_asked_for(dtype, expected) -> None:
    found = merged(dtype, kept=torch.bfloat16)
    assert {found.dtype(name) for name in found} == {found[name].dtype for name in found} == {expected}


def test_weights_that_no_checkpoint_holds_are_refused_with_their_checksum(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        find_weights(tmp_path, "0123456789abcdef")
    assert str(refused.value) == (
        f"model.weights = {tmp_path}: the adapter was trained beside other weights (sha256 0123456789ab...), and no "
        "checkpoint there holds these. Name the run folder that does in model.weights."
    )
