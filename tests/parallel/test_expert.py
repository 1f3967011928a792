"""Experts dealt over ranks, and rows shared by ranks, give the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from argosy.config.model import ModelConfig, MoEConfig
from argosy.models.experts import Load, MoE
from argosy.parallel.context import shard_sequence, unshard_sequence
from argosy.parallel.expert import (
    ExpertParallel,
    SentRows,
    SplitRows,
    loads_by_layer,
    loads_of,
    update_biases,
)
from argosy.parallel.world import World

ROWS, TOKENS, WIDTH, EXPERTS = 4, 16, 24, 8
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"balance": "aux", "aux_coefficient": 0.5, "z_coefficient": 0.2},
    "deepseek-v3": {
        "router": "sigmoid", "experts_per_token": 3, "shared_experts": 1, "balance": "bias", "aux_coefficient": 0.5,
    },
    "with a capacity": {"capacity_factor": 0.6, "aux_coefficient": 0.5},
}  # fmt: skip

Result = tuple[Tensor, Tensor, dict[str, Tensor], Tensor]
"""A layer's output, gradient of the input, gradients of the weights, load."""


def layer(kind: str, push: float = 0.0) -> MoE:
    """`push` sends more tokens to the first experts."""
    moe = {"experts": EXPERTS, "experts_per_token": 2, "expert_ffn_width": 16} | KINDS[kind]
    module = MoE(ModelConfig(width=WIDTH, moe=MoEConfig.model_validate(moe)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3, generator=generator)
        module.router.weight[:2] += push
    return module


def batch() -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).abs()


def step(module: MoE, x_BTD: Tensor, weights_BTD: Tensor, recomputed: bool = False) -> Result:
    x_BTD = x_BTD.clone().requires_grad_()
    y = checkpoint(module, x_BTD, use_reentrant=False) if recomputed else module(x_BTD)
    (y * weights_BTD).sum().backward()
    gradients = {name: weight.grad for name, weight in module.named_parameters()}
    return y.detach(), x_BTD.grad, gradients, module.take_load()


def whole(kind: str, push: float = 0.0) -> Result:
    return step(layer(kind, push), batch(), batch().flip(0))


def deal_out(module: MoE, rank: int, size: int) -> None:
    """Leave `rank` its experts."""
    for name, weight in list(module.experts.named_parameters()):
        setattr(module.experts, name, nn.Parameter(weight.detach().chunk(size)[rank].clone()))


def with_dealt_experts(world: World, kind: str, push: float, recomputed: bool, parts: int = 1) -> Result:
    module = layer(kind, push)
    deal_out(module, world.rank, world.size)
    module.experts.exchange, module.experts.parts = ExpertParallel(dist.group.WORLD), parts
    return step(module, *(x.chunk(world.size)[world.rank] for x in (batch(), batch().flip(0))), recomputed)


def assert_same(results: list[Result], expected: Result, join: Callable[[list[Tensor]], Tensor]) -> None:
    y, x_grad, gradients, load = expected
    torch.testing.assert_close(join([r[0] for r in results]), y)
    torch.testing.assert_close(join([r[1] for r in results]), x_grad, rtol=1e-4, atol=1e-5)
    for name, gradient in gradients.items():
        parts = [r[2][name] for r in results]
        dealt = parts[0].shape != gradient.shape
        found = torch.cat(parts) if dealt else torch.stack(parts).sum(0)
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(torch.stack([r[3] for r in results]).sum(0), load, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_dealt_experts_give_the_numbers_of_one_process(kind, size, workers):
    assert_same(workers.run(size, with_dealt_experts, kind, 0.0, False), whole(kind), torch.cat)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_travel_in_halves_give_the_same(kind, workers):
    assert_same(workers.run(2, with_dealt_experts, kind, 0.0, False, 2), whole(kind), torch.cat)


@pytest.mark.parametrize("parts", [1, 2])
def test_recomputed_and_dealt_they_do_too(parts, workers):
    assert_same(workers.run(2, with_dealt_experts, "mixtral", 0.0, True, parts), whole("mixtral"), torch.cat)


def in_order(world: World, kind: str, parts: int) -> list[str]:
    """What a rank does in a step of an experts' layer, in order."""
    done: list[str] = []

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **keys: Any) -> Any:
            done.append(what if what != "sends" else "sends back" if keys.get("is_gradient") else what)
            return function(*args, **keys)

        return both

    module = layer(kind)
    deal_out(module, world.rank, world.size)
    module.experts.exchange, module.experts.parts = ExpertParallel(dist.group.WORLD), parts
    compute = module.experts.compute
    if module.shared is not None:
        module.shared.register_forward_hook(lambda *_: done.append("shares"))
        module.shared.down.weight.register_hook(lambda _: done.append("shares"))

    def computing(x_PD: Tensor, counts_e: Tensor, **keys: Any) -> Tensor:
        done.append("computes")
        y_PD = compute(x_PD, counts_e, **keys)
        y_PD.register_hook(lambda _: done.append("computes"))
        return y_PD

    with (
        mock.patch.object(module.experts, "compute", computing),
        mock.patch.object(SentRows, "depart", noting("sends", SentRows.depart)),
        mock.patch.object(SentRows, "arrive", noting("waits", SentRows.arrive)),
    ):
        x = batch().chunk(world.size)[world.rank].requires_grad_()
        y = module(x)
        done.append("")
        y.sum().backward()
    return done


def test_while_a_half_is_computed_the_other_travels_in_backward_too(workers):
    a_pass = ["sends", "sends", "waits", "computes", "sends", "waits", "computes", "sends", "waits", "waits"]
    for done in workers.run(2, in_order, "mixtral", 2):
        turn = done.index("")
        assert done[:turn] == a_pass
        assert [what.removesuffix(" back") for what in done[turn + 1 :]] == a_pass


def test_while_tokens_travel_shared_experts_are_computed(workers):
    for done in workers.run(2, in_order, "deepseek-v3", 1):
        turn = done.index("")
        assert done[:turn] == ["sends", "shares", "waits", "computes", "sends", "waits"]
        there_and_back = ["sends", "waits", "computes", "sends", "shares", "waits"]
        assert [what.removesuffix(" back") for what in done[turn + 1 :]] == there_and_back


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_without_any_token_to_compute_take_part(size, workers):
    expected = whole("mixtral", push=10.0)
    assert Load.of(expected[3]).counts_E.tolist() == [ROWS * TOKENS] * 2 + [0] * 6
    assert_same(workers.run(size, with_dealt_experts, "mixtral", 10.0, False), expected, torch.cat)


def exchange(world: World, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    send = [(world.rank + to) % 3 for to in range(world.size)]
    receive = [(world.rank + origin) % 3 for origin in range(world.size)]
    x = torch.tensor([[float(10 * world.rank + to)] for to in range(world.size) for _ in range(send[to])])
    x = x.to(dtype).requires_grad_()
    y = SentRows(x, send, receive, dist.group.WORLD).received()
    (gradient,) = torch.autograd.grad(y, x, y.detach() + 100)
    return y.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_go_where_they_are_sent_and_their_gradients_come_back(dtype, workers):
    for rank, (y, gradient) in enumerate(workers.run(3, exchange, dtype)):
        sent = [float(10 * rank + to) for to in range(3) for _ in range((rank + to) % 3)]
        assert y.flatten().tolist() == [float(10 * o + rank) for o in range(3) for _ in range((rank + o) % 3)]
        assert gradient.flatten().tolist() == [value + 100 for value in sent]


def zigzag(world: World) -> tuple[SplitRows, Callable[[Tensor], Tensor]]:
    cut = partial(shard_sequence, rank=world.rank, size=world.size)
    return SplitRows(dist.group.WORLD, unshard_sequence, cut), cut


def stretches_of_zigzag(world: World) -> tuple[SplitRows, Callable[[Tensor], Tensor]]:
    """Four ranks: two for context, in each of whose parts two for sequence parallelism."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    outer, inner = divmod(world.rank, 2)
    context = partial(shard_sequence, rank=outer, size=2)

    def stretch(x: Tensor) -> Tensor:
        return x.chunk(2, 1)[inner]

    around = SplitRows(pairs[2 + inner], unshard_sequence, context)
    rows = SplitRows(pairs[outer], partial(torch.cat, dim=1), stretch, around)
    return rows, lambda x: stretch(context(x))


def with_shared_rows(world: World, kind: str, nested: bool) -> Result:
    module = layer(kind)
    module.rows, cut = stretches_of_zigzag(world) if nested else zigzag(world)
    return step(module, cut(batch()), cut(batch().flip(0)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_shared_rows_give_the_numbers_of_whole_ones(kind, size, workers):
    assert_same(workers.run(size, with_shared_rows, kind, False), whole(kind), unshard_sequence)


@pytest.mark.parametrize("kind", KINDS)
def test_so_do_rows_that_two_axes_share(kind, workers):
    def join(parts: list[Tensor]) -> Tensor:
        return unshard_sequence([torch.cat(parts[:2], 1), torch.cat(parts[2:], 1)])

    assert_same(workers.run(4, with_shared_rows, kind, True), whole(kind), join)


def end_a_step(world: World) -> tuple[dict[int, Load], Tensor]:
    """Two ranks of data; on a third and fourth, only layer 2, as another pipeline stage would have."""
    config = ModelConfig(width=WIDTH, layers=3, moe=MoEConfig(experts=EXPERTS, first_dense_layers=1, balance="bias"))
    mine = {2 if world.rank > 1 else 1: layer("deepseek-v3")}
    for module in mine.values():
        module(batch().chunk(2)[world.rank % 2].requires_grad_()).sum().backward()
    loads = world.sum(loads_of(mine, config, world.device))
    update_biases(mine, loads)
    return loads_by_layer(loads, config), next(iter(mine.values())).router.bias


def test_biases_follow_the_load_of_all_ranks_and_stay_equal(workers):
    module = layer("deepseek-v3")
    module(batch().requires_grad_()).sum().backward()
    flat = module.take_load()
    module.update_bias(flat[:EXPERTS])
    for loads, bias in workers.run(4, end_a_step):
        assert torch.equal(bias, module.router.bias) and bias.any()
        assert sorted(loads) == [1, 2]
        assert all(load.counts_E.tolist() == Load.of(flat).counts_E.tolist() for load in loads.values())
