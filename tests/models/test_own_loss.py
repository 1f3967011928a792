"""A loss of the user's is right in chunks, and what it must not do is found before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy.errors import UserError
from argosy.extend.declared import CodeFile, read_code
from argosy.extend.trust import approve
from argosy.models.loss import chunk_loss_and_gradient
from argosy.models.own_loss import check_loss, own_loss

CROSS_ENTROPY = "torch.nn.functional.cross_entropy(logits, targets, reduction='none')"


def code(folder: Path, body: str, arguments: str = "'mine'") -> list[CodeFile]:
    path = folder / "mine.py"
    head = f"import torch\nfrom argosy import extend\n@extend.loss({arguments})\n"
    path.write_text(f"{head}def f(logits, targets):\n    return {body}\n")
    found = [read_code(path)]
    approve(found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_written_by_a_user_is_ours(dtype, tmp_path):
    logits, targets = torch.randn(7, 13, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(7)
    targets[3] = -100
    loss, gradient = own_loss(code(tmp_path, CROSS_ENTROPY), "mine")(logits, targets)
    expected, expected_gradient = chunk_loss_and_gradient(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6)
    assert not gradient[3].any()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"{CROSS_ENTROPY}.sum()", r"mine.py:3: the loss mine returned \[\]; a loss for each token, \[6\]"),
        (f"{CROSS_ENTROPY}.detach()", "without a gradient"),
        ("1.0", "returned a float"),
        (f"{CROSS_ENTROPY} * torch.rand(())", "gave two results for the same logits"),
        (f"{CROSS_ENTROPY} * logits.sum()", "of a token depends on other tokens"),
        ("(logits.sum(1) - 1e9).log()", "is not finite"),
        ("logits.nothing", "mine.py:5: the loss mine raised AttributeError"),
    ],
)
def test_what_a_loss_must_not_do_is_found_before_a_run(body, said, tmp_path):
    with pytest.raises(UserError, match=said):
        check_loss(code(tmp_path, body), "mine")


def test_one_that_says_that_it_does_not_repeat_itself_is_taken(tmp_path):
    check_loss(code(tmp_path, f"{CROSS_ENTROPY} * torch.rand(())", "'mine', deterministic=False"), "mine")
