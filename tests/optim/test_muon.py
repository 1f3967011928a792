"""Muon: the published update, and the same one however matrices are cut up and dealt."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from argosy.config.optimizer import OptimizerConfig, OptimizerGroup
from argosy.optim import optimizer as module
from argosy.optim.optimizer import Optimizer, newton_schulz
from argosy.optim.piece import Piece
from argosy.parallel.world import World
from optim.pieces import gather_over, normal, part_of, train

CONFIG = OptimizerConfig(kind="muon", lr=1e-2)
GROUPED = OptimizerConfig(kind="muon", lr=1e-2, groups=(OptimizerGroup(match="*.o.weight", lr_factor=0.5),))
SHAPES = {
    "blocks.0.attention.q.weight": (48, 32),
    "blocks.0.attention.o.weight": (32, 48),
    "blocks.0.mlp.down.weight": (5, 24),
    "blocks.0.mlp.experts.up": (8, 12, 6),
    "blocks.0.mlp.experts.down": (3, 6, 12),
    "blocks.1.attention.q.weight": (48, 32),
    "embedding.weight": (20, 16),
    "norm.weight": (10,),
}


def reference(name: str, shape: tuple[int, int], steps: int) -> torch.Tensor:
    """One matrix by Jordan's post and equation 4 of Liu et al. 2025, in plain terms and double precision."""
    weight, momentum = normal(shape, name).double(), torch.zeros(shape, dtype=torch.float64)
    for step in range(steps):
        gradient = normal(shape, name, step).double() * 0.1
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        x = x / torch.sqrt((x * x).sum())
        for _ in range(5):  # on singular values: a s + b s^3 + c s^5
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        weight = weight - 1e-2 * (0.2 * max(shape) ** 0.5 * x + 0.1 * weight)
    return weight.float()


def whole_pieces() -> list[Piece]:
    return [Piece(name, normal(shape, name), shape) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if "blocks" in name and len(shape) == 2])
def test_update_is_the_published_one(name):
    piece = Piece(name, normal(SHAPES[name], name), SHAPES[name])
    train([piece], CONFIG, steps=3)
    torch.testing.assert_close(piece.value, reference(name, SHAPES[name], 3), rtol=1e-4, atol=1e-5)


def test_update_is_close_to_torchs_own_which_is_in_bf16():
    name = "blocks.0.attention.q.weight"
    piece = Piece(name, normal(SHAPES[name], name), SHAPES[name])
    theirs = torch.nn.Parameter(piece.value.clone())
    muon = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    before = piece.value.clone()
    train([piece], CONFIG, steps=1)
    theirs.grad = normal(piece.shape, name, 0) * 0.1
    muon.step()
    assert (piece.value - theirs).norm() < 0.02 * (piece.value - before).norm()


def test_newton_schulz_brings_singular_values_near_one_and_keeps_the_vectors():
    x = normal((3, 20, 12), "x")
    y = newton_schulz(x)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    turned = u.mT @ y @ vh.mT
    values = turned.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.25
    torch.testing.assert_close(turned, torch.diag_embed(values), rtol=0, atol=1e-4)


def test_experts_are_orthogonalized_one_by_one():
    stack = Piece("blocks.0.mlp.experts.up", normal((4, 12, 6), "stack"), (4, 12, 6))
    singles = [Piece("blocks.0.mlp.up.weight", matrix.clone(), (12, 6)) for matrix in stack.value]
    gradient = normal((4, 12, 6), "gradient")
    for piece, grad in zip([stack, *singles], [gradient, *gradient], strict=True):
        piece.value.grad = grad
        Optimizer([piece], CONFIG).step()
    torch.testing.assert_close(stack.value, torch.stack([piece.value for piece in singles]))


def cut_and_train(world: World, dim: int, dealt: bool) -> dict[str, torch.Tensor]:
    """Every parameter cut along `dim` (rows where it has only those); what becomes of them, whole again."""
    group = dist.group.WORLD
    assert group is not None
    pieces = []
    for piece in whole_pieces():
        along = min(dim, len(piece.shape) - 1)
        part = part_of(piece, along, world.rank, world.size, gather=gather_over(group, along))
        pieces.append(dataclasses.replace(part, group=group if dealt else None))
    train(pieces, CONFIG, steps=3)
    return {piece.name: piece.gather(piece.value) for piece in pieces}


def test_a_rank_with_no_part_of_a_matrix_counts_its_steps_once() -> None:
    whole = Piece("blocks.0.attention.q.weight", normal((4, 6), "q"), (4, 6))
    empty = part_of(whole, 0, rank=2, size=3, gather=lambda part: whole.value)
    assert not empty.value.numel()
    optimizer = train([empty], CONFIG, steps=3)
    assert float(optimizer.state_of(empty)["step"]) == 3


def replicate_and_train(world: World) -> tuple[dict[str, torch.Tensor], int]:
    """Every rank has all parameters whole; what becomes of them, and how many matrices this rank worked on."""
    pieces = [dataclasses.replace(piece, group=dist.group.WORLD) for piece in whole_pieces()]
    with mock.patch.object(module, "newton_schulz", wraps=newton_schulz) as work:
        train(pieces, CONFIG, steps=1)
    return {piece.name: piece.value for piece in pieces}, work.call_count


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    pieces = whole_pieces()
    train(pieces, CONFIG, steps=3)
    return {piece.name: piece.value for piece in pieces}


@pytest.mark.parametrize("dealt", [False, True], ids=["each-rank", "dealt"])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_cut_gives_the_weights_of_one_process(workers, alone, size, dim, dealt):
    for result in workers.run(size, cut_and_train, dim, dealt):
        for name, weight in alone.items():
            torch.testing.assert_close(result[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def prepare_and_step_alone(world: World) -> dict[str, torch.Tensor]:
    """Prepare together; then step with no collective that anybody would answer."""
    pieces = [dataclasses.replace(piece, group=dist.group.WORLD) for piece in whole_pieces()]
    optimizer = Optimizer(pieces, GROUPED)
    assert not optimizer.is_local
    for piece in pieces:
        piece.value.grad = normal(piece.shape, piece.name, 0) * 0.1
    moments = [tensor.clone() for piece in pieces for tensor in optimizer.state_of(piece).values()]
    optimizer.prepare()
    for piece in pieces:
        assert torch.equal(piece.value, normal(piece.shape, piece.name)), piece.name
    assert all(map(torch.equal, moments, [t for piece in pieces for t in optimizer.state_of(piece).values()]))
    with (
        mock.patch.object(module.dist, "broadcast", side_effect=AssertionError),
        mock.patch.object(module, "newton_schulz"),
    ):
        if world.is_first:  # the other is gone
            optimizer.step()
    return {piece.name: piece.value for piece in pieces}


def test_a_rank_that_trains_nothing_waits_for_the_others_too():
    """As a pipeline's first does, whose layers are all frozen: before each update all ranks meet, or none."""
    assert not Optimizer([], CONFIG).is_local


def test_a_prepared_step_takes_no_other_rank_and_nothing_has_changed_before_it(workers):
    alone = whole_pieces()
    train(alone, GROUPED, steps=1)
    first, _ = workers.run(2, prepare_and_step_alone)
    for piece in alone:
        torch.testing.assert_close(first[piece.name], piece.value, rtol=1e-5, atol=1e-6)


def test_replicas_deal_the_work_and_stay_equal(workers):
    alone = whole_pieces()
    train(alone, CONFIG, steps=1)
    results, worked_on = zip(*workers.run(4, replicate_and_train), strict=True)
    assert sorted(worked_on) == [1, 1, 2, 2], "six hidden matrices: four of two dims, two stacks"
    for result in results:
        for piece in alone:
            assert torch.equal(result[piece.name], results[0][piece.name])
            torch.testing.assert_close(result[piece.name], piece.value, rtol=1e-5, atol=1e-6)
