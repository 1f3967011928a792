"""The optimizer as the loop and the checkpoint see it: rates, state, resuming, cuts, small number formats."""

from __future__ import annotations

import itertools

import pytest
import torch

from argosy import compiler
from argosy.config.optimizer import OptimizerConfig, OptimizerGroup
from argosy.models.decoder import Decoder
from argosy.optim.optimizer import Optimizer
from argosy.optim.piece import Piece
from optim.pieces import normal, part_of, train, whole_pieces
from tiny import decoder

BF16, FP32 = torch.bfloat16, torch.float32
EVERY_KIND = [
    pytest.param(OptimizerConfig(kind=kind, state=state, lr=1e-3), dtype, id=f"{kind}-{state}-{str(dtype)[6:]}")
    for kind, state, dtype in itertools.product(("adamw", "lion", "muon"), ("fp32", "int8"), (FP32, BF16))
]


def test_learning_rate_is_times_each_groups_factor():
    groups = (OptimizerGroup(match="head.*", lr_factor=0.25), OptimizerGroup(match="embedding.*", lr_factor=0))
    config = OptimizerConfig(kind="lion", lr=1.0, weight_decay=0, groups=groups)
    pieces = whole_pieces()
    before = {piece.name: piece.value.clone() for piece in pieces}
    optimizer = Optimizer(pieces, config)
    for piece in pieces:
        piece.value.grad = torch.ones_like(piece.value)
    optimizer.set_learning_rate(0.5)
    optimizer.step()
    factor = {"head.weight": 0.25, "embedding.weight": 0.0}
    for piece in pieces:
        moved = before[piece.name] - piece.value
        torch.testing.assert_close(moved, torch.full_like(moved, 0.5 * factor.get(piece.name, 1.0)))


@pytest.mark.parametrize(("config", "dtype"), EVERY_KIND)
def test_resumed_optimizer_goes_on_bit_for_bit(config, dtype):
    straight, stopped = whole_pieces(dtype), whole_pieces(dtype)
    train(straight, config, steps=6)
    first = train(stopped, config, steps=3)
    saved = {piece.name: {k: v.clone() for k, v in first.state_of(piece).items()} for piece in stopped}
    assert all(tensor.dtype == FP32 for state in saved.values() for tensor in state.values())
    resumed = Optimizer(stopped, config, seed=3)
    for piece in stopped:
        resumed.load_state(piece, saved[piece.name])
    train(stopped, config, steps=3, optimizer=resumed)
    for ours, theirs in zip(stopped, straight, strict=True):
        assert torch.equal(ours.value, theirs.value), ours.name


@pytest.mark.parametrize(("config", "dtype"), [p for p in EVERY_KIND if "muon" not in p.id])
@pytest.mark.parametrize("size", [3, 7])
def test_parts_become_what_the_whole_becomes_bit_for_bit(config, dtype, size):
    whole = whole_pieces(dtype)
    train(whole, config)
    parts = [[part_of(piece, 0, rank, size) for piece in whole_pieces(dtype)] for rank in range(size)]
    assert any(piece.value.numel() == 0 for piece in itertools.chain(*parts))
    for mine in parts:
        train(mine, config)
    for piece, *cut in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([part.value for part in cut]), piece.value), piece.name


def test_parts_by_columns_become_what_the_whole_becomes_bit_for_bit():
    config = OptimizerConfig(state="int8")
    whole = Piece("head.weight", normal((16, 1024), "head").to(BF16), (16, 1024))
    parts = [part_of(whole, 1, rank, 2) for rank in range(2)]
    for piece in (whole, *parts):
        train([piece], config)
    assert torch.equal(torch.cat([part.value for part in parts], 1), whole.value)


def test_compiled_kernels_narrow_and_widen_to_the_same_bits():
    compiler.load()
    config = OptimizerConfig(state="int8")
    for shape, dim in (((16, 1024), 1), ((4, 80, 256), 0)):
        whole = Piece("head.weight", normal(shape, "head").to(BF16), shape)
        pieces = [part_of(whole, dim, 1, 2) for _ in range(2)]
        states = []
        for piece, is_compiled in zip(pieces, (False, True), strict=True):
            optimizer = train([piece], config, optimizer=Optimizer([piece], config, is_compiled=is_compiled))
            states.append({"value": piece.value} | optimizer.state_of(piece))
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU divides otherwise")
def test_moments_of_a_gpu_s_kernels_come_back_bit_for_bit():
    compiler.load()
    config, shape = OptimizerConfig(state="int8"), (512, 1024)
    piece = Piece("head.weight", normal(shape, "head").to("cuda", BF16), shape)
    optimizer, other = (Optimizer([piece], config, is_compiled=True) for _ in range(2))
    train([piece], config, optimizer=optimizer)
    kept = optimizer.state_of(piece)
    other.load_state(piece, {key: value.clone() for key, value in kept.items()})
    assert all(torch.equal(kept[key], value) for key, value in other.state_of(piece).items())
    assert all(torch.equal(value, other.kept_of(piece)[key]) for key, value in optimizer.kept_of(piece).items())


@pytest.mark.parametrize(("config", "dtype"), EVERY_KIND)
def test_state_before_the_first_step_is_zeros_of_the_shapes_it_will_have(config, dtype):
    pieces = whole_pieces(dtype)
    optimizer = Optimizer(pieces, config)
    made = {piece.name: optimizer.state_of(piece) for piece in pieces}
    assert not any(tensor.any() for state in made.values() for tensor in state.values())
    train(pieces, config, steps=1, optimizer=optimizer)
    for piece in pieces:
        after = optimizer.state_of(piece)
        assert after["step"] == 1 and after.keys() == made[piece.name].keys()
        assert all(after[key].shape == made[piece.name][key].shape for key in after)


def test_state_of_another_rule_or_shape_is_refused():
    pieces = whole_pieces()
    optimizer, other = Optimizer(pieces, OptimizerConfig()), Optimizer(pieces, OptimizerConfig(kind="lion"))
    with pytest.raises(KeyError, match="exp_avg_sq"):
        optimizer.load_state(pieces[0], other.state_of(pieces[0]))
    with pytest.raises(ValueError, match="exp_avg is"):
        optimizer.load_state(pieces[0], optimizer.state_of(pieces[1]))


def test_missing_gradient_is_an_error_that_names_the_parameter():
    pieces = whole_pieces()
    with pytest.raises(ValueError, match=r"embedding\.weight has no gradient"):
        Optimizer(pieces, OptimizerConfig()).step()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float16"):
        Optimizer(whole_pieces(torch.float16), OptimizerConfig())


def test_gradients_are_let_go():
    pieces = whole_pieces()
    optimizer = train(pieces, OptimizerConfig(), steps=1)
    optimizer.zero_grad()
    assert all(piece.value.grad is None for piece in pieces)


def test_int8_state_takes_about_a_quarter_of_the_memory():
    sizes = {s: train(whole_pieces(), OptimizerConfig(state=s), steps=1).state_bytes for s in ("fp32", "int8")}
    elements = sum(piece.value.numel() for piece in whole_pieces())
    assert sizes["fp32"] == 8 * elements
    # Rows of 64 make short blocks here: a scale (4 bytes) for 64 elements, for 32 in the experts.
    assert sizes["int8"] < 0.29 * sizes["fp32"]


def test_bf16_weights_move_by_steps_smaller_than_their_spacing():
    """A step of 1e-4 on weights near 1.2, which bf16 keeps 2**-7 apart, is lost entirely by rounding to the nearest."""
    piece = Piece("blocks.0.mlp.up.weight", torch.full((256, 256), 1.2, dtype=BF16), (256, 256))
    start = piece.value.float()
    optimizer = Optimizer([piece], OptimizerConfig(kind="lion", lr=1e-4, weight_decay=0))
    for _ in range(20):
        piece.value.grad = torch.ones_like(piece.value)
        optimizer.step()
    moved = start - piece.value.float()
    assert moved.mean().item() == pytest.approx(20 * 1e-4, rel=0.05)
    # Each step draws anew: otherwise the same few weights would move each time.
    assert (moved > 0).float().mean().item() == pytest.approx(1 - (1 - 1e-4 * 2**7) ** 20, rel=0.05)


def test_int8_moments_move_by_steps_smaller_than_their_spacing():
    """Without gradients a second moment falls by 0.1 % in a step; eight bits keep numbers 6 % or more apart."""
    piece = Piece("head.weight", torch.zeros(64, 64), (64, 64))
    optimizer = Optimizer([piece], OptimizerConfig(beta2=0.999, state="int8"))
    moments = normal((64, 64), "v").square().clamp(min=0.1)
    moments[:, 0] = 1e3
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(64, 64), "exp_avg_sq": moments}
    optimizer.load_state(piece, state)
    before = optimizer.state_of(piece)["exp_avg_sq"].clone()
    for _ in range(100):
        piece.value.grad = torch.zeros_like(piece.value)
        piece.value.grad[:, 0] = 1e3**0.5  # keeps every block's scale where it is: codes would fall along with it
        optimizer.step()
    after = optimizer.state_of(piece)["exp_avg_sq"]
    assert (after[:, 1:].sum() / before[:, 1:].sum()).item() == pytest.approx(0.999**100, rel=0.01)


def test_random_rounding_differs_by_seed_and_by_parameter():
    def stepped(name: str, seed: int) -> torch.Tensor:
        piece = Piece(name, torch.full((64, 64), 1.2, dtype=BF16), (64, 64))
        piece.value.grad = torch.ones_like(piece.value)
        Optimizer([piece], OptimizerConfig(kind="lion", lr=1e-3), seed).step()
        return piece.value

    assert torch.equal(stepped("a.weight", 0), stepped("a.weight", 0))
    assert not torch.equal(stepped("a.weight", 0), stepped("a.weight", 1))
    assert not torch.equal(stepped("a.weight", 0), stepped("b.weight", 0))


def language_model_loss(config: OptimizerConfig, dtype: torch.dtype, steps: int = 30) -> float:
    """Mean loss of the last ten steps of a small decoder on a text in which each token follows from the one before."""
    vocab = 97
    model: Decoder = decoder(width=64, ffn_width=128, vocab_size=vocab).to(dtype)
    pieces = [Piece(name, weight, tuple(weight.shape)) for name, weight in model.named_parameters()]
    optimizer = Optimizer(pieces, config, seed=1)
    generator = torch.Generator().manual_seed(0)
    follower, losses = torch.randperm(vocab, generator=generator), []
    for _ in range(steps):
        text = [torch.randint(vocab, (16,), generator=generator)]
        while len(text) <= 16:
            text.append(follower[text[-1]])
        tokens = torch.stack(text, 1)
        loss = model(tokens[:, :-1], tokens[:, 1:].contiguous()) / (16 * 16)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize(
    ("kind", "lr"),
    [("adamw", 5e-3), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("lion", 2e-3), ("muon", 5e-3)))],
)
def test_small_number_formats_learn_as_fast_as_fp32(kind, lr):
    full = language_model_loss(OptimizerConfig(kind=kind, lr=lr), FP32)
    assert full < 2.0, "of 4.6 at the start: it is learned, so that the comparison means something"
    for state, dtype in (("int8", FP32), ("int8", BF16)):
        small = language_model_loss(OptimizerConfig(kind=kind, lr=lr, state=state), dtype)
        assert small == pytest.approx(full, rel=0.1), (state, dtype)


def test_a_rank_with_no_part_of_a_parameter_counts_its_steps_too() -> None:
    (whole, *_) = whole_pieces()
    empty = part_of(whole, 0, rank=5, size=200)  # of 300 rows, each of 150 ranks has two
    last = part_of(whole, 0, rank=199, size=200)
    for piece, rows in ((empty, 2), (last, 0)):
        assert len(piece.value) == rows
        optimizer = train([piece], OptimizerConfig(), steps=3)
        assert float(optimizer.state_of(piece)["step"]) == 3
