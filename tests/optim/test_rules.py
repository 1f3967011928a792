"""AdamW is torch's; an optimizer of the user's updates pieces like any other, and is checked before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy.config.optimizer import OptimizerConfig, OptimizerGroup
from argosy.errors import RunFailed, UserError
from argosy.extend.declared import CodeFile, read_code
from argosy.extend.loading import approve
from argosy.optim.optimizer import Optimizer, check_rule, user_rule
from argosy.optim.piece import Piece
from optim.pieces import normal, train, whole_pieces


def gradients(name: str, shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    return [normal(shape, name, step) * 0.1 for step in range(steps)]


def test_adamw_is_that_of_torch():
    groups = (OptimizerGroup(match="head.*", lr_factor=0.5, weight_decay=0.3),)
    pieces = whole_pieces()
    train(pieces, OptimizerConfig(lr=1e-2, groups=groups), steps=5)
    for piece in pieces:
        reference = torch.nn.Parameter(normal(piece.shape, piece.name))
        lr, decay = (5e-3, 0.3) if piece.name == "head.weight" else (1e-2, 0.1 if reference.ndim > 1 else 0.0)
        if piece.name.endswith("bias"):
            decay = 0.0
        adam = torch.optim.AdamW([reference], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay, fused=True)
        for gradient in gradients(piece.name, piece.shape, 5):
            reference.grad = gradient
            adam.step()
        assert torch.equal(piece.value, reference), piece.name


def test_lion_is_that_of_the_paper():
    pieces = whole_pieces()
    train(pieces, OptimizerConfig(kind="lion", lr=1e-2, beta1=0.9, beta2=0.99), steps=5)
    for piece in pieces:
        weight, momentum = normal(piece.shape, piece.name), torch.zeros(piece.shape)
        decay = 0.1 if len(piece.shape) > 1 else 0.0
        for gradient in gradients(piece.name, piece.shape, 5):
            step = torch.sign(0.9 * momentum + 0.1 * gradient)
            weight = weight - 1e-2 * (step + decay * weight)
            momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(piece.value, weight, rtol=1e-5, atol=1e-6)


LION = """
def {name}(u):
    sign = u.moments["m"].lerp(u.gradient, 1 - u.settings["beta1"]).sign_()
    u.weight.mul_(1 - u.lr * u.weight_decay).sub_(sign, alpha=u.lr)
    u.moments["m"].lerp_(u.gradient, 1 - u.settings["beta2"])
"""


def code(folder: Path, text: str) -> list[CodeFile]:
    path = folder / "mine.py"
    path.write_text(f"import torch\nfrom argosy import extend\n{text}")
    found = [read_code(path)]
    approve(found)
    return found


def pieces(dtype: torch.dtype) -> list[Piece]:
    def value(*shape: int) -> torch.Tensor:
        tensor = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(dtype)
        tensor.grad = (tensor * 3).sin()
        return tensor

    return [
        Piece("a.weight", value(8, 4), (8, 4)),
        Piece("norm.weight", value(5), (5,)),
        Piece("e", value(0, 4), (2, 4)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lion_written_by_a_user_is_lion_bit_for_bit(dtype, tmp_path):
    config = OptimizerConfig(kind="lion")
    built_in = Optimizer(pieces(dtype), config)
    mine = config.model_copy(update={"kind": "mine"})
    own = Optimizer(
        pieces(dtype),
        mine,
        0,
        user_rule(
            code(tmp_path, f"@extend.optimizer('mine', moments=('m',))\n{LION.strip().format(name='f')}\n"), "mine"
        ),
    )
    for optimizer in (built_in, own):
        for _ in range(3):
            optimizer.step()
    for left, right in zip(built_in.pieces, own.pieces, strict=True):
        assert torch.equal(left.value, right.value)
        assert torch.equal(built_in.state_of(left)["exp_avg"], own.state_of(right)["m"])
    assert own.state_bytes == built_in.state_bytes
    assert own.is_local


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", "mine.py:3: the optimizer mine changed no weight"),
        ("u.weight.add_(torch.rand(()))", "gave two results for one gradient"),
        ("u.weight.sub_(u.gradient / u.gradient.norm())", "computes? each element from that element alone"),
        ("u.wieght.add_(1)", r"mine.py:5: the optimizer mine raised AttributeError"),
        ("u.moments['n'].add_(1)", "raised KeyError: 'n', for a.trial at its step 1. Mend it.$"),
    ],
)
def test_what_an_optimizer_must_not_do_is_found_before_a_run(body, said, tmp_path):
    text = f"@extend.optimizer('mine', moments=('m',))\ndef f(u):\n    {body}\n"
    with pytest.raises(UserError, match=said):
        check_rule(code(tmp_path, text), OptimizerConfig(kind="mine"))


def test_one_that_says_that_it_does_not_repeat_itself_is_taken(tmp_path):
    text = "@extend.optimizer('mine', deterministic=False)\ndef f(u): u.weight.add_(torch.rand(()))\n"
    check_rule(code(tmp_path, text), OptimizerConfig(kind="mine"))


def test_one_that_raises_in_a_run_ends_it_with_its_name_and_line(tmp_path):
    text = "@extend.optimizer('mine')\ndef f(u):\n    raise OverflowError('much')\n"
    rule = user_rule(code(tmp_path, text), "mine")
    with pytest.raises(
        RunFailed, match=r"mine.py:5: the optimizer mine raised OverflowError: much, for a.weight at its"
    ):
        Optimizer(pieces(torch.float32), OptimizerConfig(kind="mine"), 0, rule).step()
