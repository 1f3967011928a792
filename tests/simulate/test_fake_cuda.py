"""Tensors on a GPU that is not there: which have values, what makes the host wait, and what may not meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.parallel.world import World
from argosy.simulate.device_watch import DeviceWatch
from argosy.simulate.fake_cuda import MOST_KNOWN_VALUES, MisplacedTensor, is_on_cuda
from argosy.simulate.on_cuda import fake_cuda


@contextmanager
def watched() -> Iterator[tuple[World, DeviceWatch]]:
    watch = DeviceWatch()
    with fake_cuda(0, 1, watch) as world, watch.counting("test"):
        yield world, watch


def waits(watch: DeviceWatch) -> list[str]:
    return [found.what for found, count in watch.host_syncs.items() for _ in range(count)]


COUNTS = (3, 1, 2, 0)


VALUES: list[tuple[Callable[[Tensor], Tensor], Any]] = [
    (lambda x: x * 2 + 1, [7, 3, 5, 1]),
    (lambda x: x.cumsum(0), [3, 4, 6, 6]),
    (lambda x: (x > 1).logical_not(), [False, True, False, True]),
    (lambda x: x.argsort(), [3, 1, 2, 0]),
    (lambda x: x.double() / 4, [0.75, 0.25, 0.5, 0.0]),
    (lambda x: x.clone().add_(1), [4, 2, 3, 1]),
    (lambda x: torch.zeros_like(x).scatter_(0, x, 9), [9, 9, 9, 9]),
    (lambda x: x.view(2, 2).sum(1), [4, 2]),
    (lambda x: torch.arange(4, device=x.device)[x], [3, 1, 2, 0]),
    (lambda x: x.max(), 3),
    (lambda x: x.float() + 0.5, [1.0, 1.0, 1.0, 1.0]),  # numbers that are computed with are not known
    (lambda x: x.float().long(), [1, 1, 1, 1]),
]


def test_whole_numbers_truth_values_and_doubles_follow_from_the_hosts():
    with watched() as (world, _):
        found = [compute(torch.tensor(COUNTS, device=world.device)) for compute, _ in VALUES]
        assert all(is_on_cuda(each) and each.device == world.device for each in found)
        assert [each.tolist() for each in found] == [values for _, values in VALUES]


def test_what_is_large_or_written_over_with_unknown_numbers_is_unknown():
    with watched() as (world, _):
        large, small = (
            torch.zeros(size, dtype=torch.int64, device=world.device) for size in (MOST_KNOWN_VALUES + 1, 8)
        )
        assert (large[0].item(), small[0].item()) == (1, 0)
        numbers = torch.tensor([5.0, 6.0], dtype=torch.float64, device=world.device)
        numbers[0] = 2.0
        assert numbers.tolist() == [2.0, 6.0]
        numbers.copy_(torch.randn(2, device=world.device))
        assert numbers.tolist() == [1.0, 1.0]


WAITS: dict[str, tuple[Callable[[Tensor], object], list[str]]] = {
    "item": (lambda x: x.sum().item(), ["a number is read"]),
    "truth": (lambda x: bool((x > 0).any()), ["a number is read"]),
    "list": (lambda x: x.tolist(), ["numbers are read"]),
    "nonzero": (lambda x: x.nonzero(), ["nonzero: how many there are must be known"]),
    "mask": (lambda x: x[x > 1], ["nonzero: how many there are must be known"]),
    "masked_select": (lambda x: x.masked_select(x > 1), ["masked_select: how many there are must be known"]),
    "unique": (lambda x: x.unique(), ["unique: how many there are must be known"]),
    "bincount": (lambda x: x.bincount(), ["bincount: the largest must be known"]),
    "equal": (lambda x: torch.equal(x, x + 1), ["a comparison is read"]),
    "mask that is written to": (
        lambda x: x.index_put_((x > 1,), x.new_zeros(())), ["a mask as an index: how many there are must be known"],
    ),
    "index of the host": (lambda x: x[torch.tensor([0, 1])], ["an index in host memory is copied"]),
    "repeat": (
        lambda x: x.repeat_interleave(x), ["repeat_interleave: how many there are must be known (output_size)"],
    ),
    "to the host": (lambda x: x.cpu(), ["a copy to the host"]),
    "from the host": (lambda x: torch.ones(3).to(x.device), ["a copy out of memory that is not pinned"]),
    "into the host": (lambda x: torch.zeros(4, dtype=torch.int64).copy_(x), ["a copy to the host"]),
    "at once out of memory that is not pinned": (
        lambda x: torch.ones(3).to(x.device, non_blocking=True), ["a copy out of memory that is not pinned"],
    ),
}  # fmt: skip


FREE: list[Callable[[Tensor], object]] = [
    lambda x: x * 2 - x.sum(),
    lambda x: x[x],
    lambda x: torch.where(x > 1, x, 0),
    lambda x: x.repeat_interleave(x, output_size=6),
    lambda x: torch.arange(100, device=x.device),
    lambda x: x.index_add_(0, x, x),
]
"""What the device does by itself."""


def test_the_host_waits_for_what_it_has_to_know_alone():
    found: dict[str, list[str]] = {}
    with watched() as (world, watch):
        for case, ask in [*((case, ask) for case, (ask, _) in WAITS.items()), *(("free", ask) for ask in FREE)]:
            x = torch.tensor(COUNTS, device=world.device)
            watch.host_syncs.clear()
            ask(x)
            found.setdefault(case, []).extend(waits(watch))
    assert found == {case: what for case, (_, what) in WAITS.items()} | {"free": []}


def test_tensors_of_host_device_and_meta_are_told_apart():
    with watched() as (world, watch):
        x = torch.tensor(COUNTS, device=world.device)
        there, kept = x.cpu(), torch.zeros(4, dtype=torch.int64)
        kept.copy_(x + 1)
        assert there.tolist() == list(COUNTS) and kept.tolist() == [4, 2, 3, 1]
        assert there.is_cpu and not is_on_cuda(there) and x.is_cuda and not x.is_cpu and not x.is_meta
        assert torch.empty(3, device="meta").is_meta
        assert is_on_cuda(x + torch.tensor(2))  # one number may come from the host
        with pytest.raises(MisplacedTensor, match=r"aten\.add\.Tensor"):
            x + torch.ones(4)
    (finding,) = watch.misplaced
    assert finding.part == "test" and "cpu" in finding.what and "cuda" in finding.what
