"""Matrices split over ranks give the losses and gradients of one process; nothing of them is on two ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from argosy.models import loss as loss_module
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.layers import Embedding, local
from argosy.models.loss import chunk_loss_and_gradient
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.tensor import (
    SequenceParallel,
    VocabularyLoss,
    gather_sequence,
    looks_up,
    reduce_scatter_sequence,
    split,
    split_over_ranks,
)
from argosy.parallel.world import World
from argosy.plan.parameters import parameter_table
from tiny import MODEL, decoder, eager, gradients, laid_out, model_config

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


ROWS = np.random.default_rng(0).integers(0, 400, (2, 33)).astype(np.int32)
ROWS[0, 9] = ROWS[1, 20:22] = 0
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True, "family": "qwen3"},
    "biases": {"attention_bias": True},
    "norm of all heads": {"qk_norm": True, "attention": {"norm_over": "all"}, "norms": {"kind": "layer", "bias": True}},
    "qwen2": {"qkv_bias": True, "family": "qwen2"},
    "tied": {"tie_embeddings": True},
    "a key/value head for each query head": {"kv_heads": 4},
    "one key/value head": {"kv_heads": 1, "attention_bias": True, "qk_norm": True},
    "vocabulary that the ranks do not share evenly": {"vocab_size": 403},
}


def whole_batch() -> Any:
    (micro,) = microbatches(ROWS, 2, 0, torch.device("cpu"))
    return micro


def step(world: World, variant: dict[str, Any], plan: str) -> tuple[float, dict[str, Tensor]]:
    model = laid_out(world, eager(plan), model=variant)
    from argosy.observe.clock import StepClock

    share = model.forward_backward([whole_batch()], 1.0, StepClock(world.device))
    model.finish_gradients()
    return share.item(), gradients(model)


FOR_FOUR = ("llama", "one key/value head", "vocabulary that the ranks do not share evenly")
"""Four ranks meet heads and rows that do not come out even; other variants are cut for two as for four."""


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        pytest.param(
            variant, size, id=f"{name}-{size}", marks=() if size == 2 or name in FOR_FOUR else pytest.mark.slow
        )
        for name, variant in VARIANTS.items()
        for size in (2, 4)
    ],
)
def test_loss_and_gradients_are_those_of_one_process(workers, variant, size):
    model, micro = decoder(**variant), whole_batch()
    loss = model(micro.tokens_BT, micro.targets_BT, micro.positions_BT)
    loss.backward()
    shares, found = zip(*workers.run(size, step, variant, f"tp={size},microbatch=2"), strict=True)
    assert shares == (pytest.approx(loss.item(), rel=1e-6), *[0.0] * (size - 1)), "one of the ranks reports"
    for mine in found:
        assert mine.keys() == dict(model.named_parameters()).keys()
        for name, gradient in mine.items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()), msg=name)


def shapes(world: World, variant: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    model = Decoder(model_config(**variant))
    split_over_ranks(
        model,
        init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",)),
        parameter_table(model.config, tp=world.size),
    )
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    materialize(model, model.config, torch.device("cpu"), 0)
    return {name: tuple(local(parameter).shape) for name, parameter in model.named_parameters()}


def test_each_rank_has_a_part_of_each_matrix(workers):
    width, ffn, head = MODEL["width"], MODEL["ffn_width"], MODEL["head_width"]
    by_rank = workers.run(4, shapes, {"vocab_size": 403})
    assert [found["embedding.weight"] for found in by_rank] == [(101, width)] * 3 + [(100, width)]
    assert [found["head.weight"] for found in by_rank] == [(101, width)] * 3 + [(100, width)]
    for found in by_rank:
        assert found["blocks.1.attention.q.weight"] == (head, width)
        assert found["blocks.1.attention.k.weight"] == (2 * head, width), "both key/value heads: fewer than ranks"
        assert found["blocks.1.attention.o.weight"] == (width, head)
        assert found["blocks.1.mlp.gate.weight"] == found["blocks.1.mlp.up.weight"] == (ffn // 4, width)
        assert found["blocks.1.mlp.down.weight"] == (width, ffn // 4)
        assert found["blocks.1.mlp_norm.weight"] == found["norm.weight"] == (width,)


def add_a_module(world: World) -> None:
    model = Decoder(model_config())
    model.adapter = nn.Linear(2, 2)
    split_over_ranks(
        model,
        init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",)),
        parameter_table(model.config, tp=world.size),
    )


def test_a_parameter_that_the_table_does_not_have_is_named(workers):
    with pytest.raises(AssertionError, match=r"KeyError: 'adapter\.weight'"):
        workers.run(2, add_a_module)


def logits_and_targets(vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_CV = 30 * torch.randn(11, vocab, generator=generator)
    targets_C = torch.arange(11) % vocab
    targets_C[[2, 7]] = -100
    return logits_CV, targets_C


def vocabulary_loss(world: World, vocab: int) -> tuple[Tensor, Tensor]:
    logits_CV, targets_C = logits_and_targets(vocab)
    rows = -(-vocab // world.size)
    first = min(world.rank * rows, vocab)
    return VocabularyLoss(dist.group.WORLD, first)(logits_CV[:, first : first + rows], targets_C)


@pytest.mark.parametrize("vocab", [8, 11, 5, 3])  # of 5, the last of four ranks has none; of 3, too
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_over_parts_of_the_vocabulary_is_that_over_the_whole(workers, vocab, size):
    loss, gradient_CV = chunk_loss_and_gradient(*logits_and_targets(vocab))
    losses, parts = zip(*workers.run(size, vocabulary_loss, vocab), strict=True)
    torch.testing.assert_close(torch.cat(parts, dim=1), gradient_CV, rtol=1e-5, atol=1e-6)
    for found in losses:
        torch.testing.assert_close(found, loss)


def loss_in_chunks(world: World, logits_at_once: int, vocab: int) -> float:
    """This rank's share of the summed loss of 64 tokens."""
    rows = np.random.default_rng(0).integers(0, vocab, (2, 33)).astype(np.int32)
    with (
        mock.patch.object(loss_module, "CHUNK_LOGITS", logits_at_once),
        mock.patch.object(loss_module, "LEAST_CHUNK_ROWS", {"cpu": 1}),
    ):
        model = laid_out(world, eager(f"tp={world.size},microbatch=2"), model={"vocab_size": vocab})
        return model.forward_backward(microbatches(rows, 2, 0, world.device), 1.0, StepClock(world.device)).item()


@pytest.mark.parametrize(("vocab", "logits_at_once"), [(403, 1000), (5, 16)])
def test_ranks_with_parts_of_different_lengths_cut_the_tokens_into_the_same_chunks(workers, vocab, logits_at_once):
    """The ranks have 101 or 100 of 403, so 1000 logits are 9 or 10 tokens; the last rank has none of 5."""
    whole = loss_in_chunks(World(), 10**9, vocab)
    assert sum(workers.run(4, loss_in_chunks, logits_at_once, vocab)) == pytest.approx(whole, rel=1e-6)


def lookup(world: World, vocab: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens' vectors, and the gradient of its rows."""
    weight_VD = torch.randn(vocab, 6, generator=torch.Generator().manual_seed(0))
    embedding = Embedding(vocab, 6, torch.float32)
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tp",))
    split(embedding, "weight", mesh, 0)
    looks_up(embedding, mesh, SequenceParallel(mesh.get_group()))
    rows = -(-vocab // world.size)
    with torch.no_grad():
        local(embedding.weight).copy_(weight_VD[min(world.rank * rows, vocab) :][:rows])
    x_BtD = embedding(torch.arange(16).view(2, 8) % vocab)
    (x_BtD * (world.rank + 1)).sum().backward()
    return x_BtD.detach(), local(embedding.weight.grad)


@pytest.mark.parametrize("vocab", [8, 11, 5])
def test_an_embedding_in_rows_gives_each_rank_its_tokens_bit_for_bit(workers, vocab):
    weight_VD = torch.randn(vocab, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens_BT = torch.arange(16).view(2, 8) % vocab
    x_BTD = nn.functional.embedding(tokens_BT, weight_VD)
    (x_BTD * torch.arange(1, 5).repeat_interleave(2)[:, None]).sum().backward()
    vectors, grads = zip(*workers.run(4, lookup, vocab), strict=True)
    assert torch.equal(torch.cat(vectors, dim=1), x_BTD.detach())
    assert torch.equal(torch.cat(grads), weight_VD.grad)
