"""What gradients flow through is what one process would compute that had everything."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from argosy.parallel.collectives import gather_sequence, reduce_scatter_sequence
from argosy.parallel.world import World

B, T, D = 3, 8, 5  # T tokens of all ranks


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gathered(world: World) -> tuple[Tensor, Tensor]:
    """All tokens, and the gradient of this rank's; each rank weighs the result in another way."""
    t = T // world.size
    mine = drawn(B, T, D, seed=0)[:, world.rank * t : (world.rank + 1) * t].requires_grad_()
    whole = gather_sequence(mine, dist.group.WORLD)
    (whole * drawn(B, T, D, seed=1 + world.rank)).sum().backward()
    return whole.detach(), mine.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathering_gives_all_tokens_in_order_and_sums_what_all_ranks_say_of_one(workers, size):
    expected = sum(drawn(B, T, D, seed=1 + rank) for rank in range(size)).chunk(size, dim=1)
    for (whole, gradient), mine in zip(workers.run(size, gathered), expected, strict=True):
        assert torch.equal(whole, drawn(B, T, D, seed=0))
        torch.testing.assert_close(gradient, mine)


def scattered(world: World) -> tuple[Tensor, Tensor]:
    """This rank's tokens of the sum, and the gradient of what it put in."""
    x = drawn(B, T, D, seed=world.rank).requires_grad_()
    mine = reduce_scatter_sequence(x, dist.group.WORLD)
    (mine * drawn(B, T // world.size, D, seed=10 + world.rank)).sum().backward()
    return mine.detach(), x.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scattering_gives_each_rank_its_tokens_of_the_sum_and_all_ranks_all_gradients(workers, size):
    sums = sum(drawn(B, T, D, seed=rank) for rank in range(size)).chunk(size, dim=1)
    gradient = torch.cat([drawn(B, T // size, D, seed=10 + rank) for rank in range(size)], dim=1)
    for (mine, found), expected in zip(workers.run(size, scattered), sums, strict=True):
        torch.testing.assert_close(mine, expected)
        torch.testing.assert_close(found, gradient)


def there_and_back(world: World) -> Tensor:
    """Gather and scatter tokens that are not contiguous in memory; return the difference."""
    mine = drawn(T // world.size, B, D, seed=world.rank).transpose(0, 1)
    return reduce_scatter_sequence(gather_sequence(mine, dist.group.WORLD), dist.group.WORLD) / world.size - mine


def test_one_undoes_the_other(workers):
    for difference in workers.run(4, there_and_back):
        assert difference.abs().max() < 1e-12
