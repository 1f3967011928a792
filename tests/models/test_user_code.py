"""A user's loss is right in chunks, a family under every axis; what they must not do is found before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.extend.declared import CodeFile, read_code
from argosy.extend.loading import approve
from argosy.models.hf import export_folder
from argosy.models.loss import chunk_loss_and_gradient
from argosy.models.user_code import check_loss, load_family, user_loss
from argosy.parallel.world import World
from argosy.plan.parameters import parameters
from argosy.plan.workload import Workload
from tiny import decoder, eager, losses, run_config, train_in

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
    loss, gradient = user_loss(code(tmp_path, CROSS_ENTROPY), "mine")(logits, targets)
    expected, expected_gradient = chunk_loss_and_gradient(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6)
    assert not gradient[3].any()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            f"{CROSS_ENTROPY}.sum()",
            r"mine.py:3: the loss mine returned \[\]; it must return a loss for each token, \[6\]",
        ),
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


EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "extend" / "families.py"
ARCEE = {"family": "arcee", "ffn_gate": False}


def run_of(corpus: Path = Path("no data"), file: Path = EXAMPLE, **model: Any) -> RunConfig:
    return run_config(
        corpus, model={**ARCEE, **model}, extend={"files": (file,)}, train={"steps": 4}, evaluate={"every_steps": 0}
    )


def trained(world: World, plan: str, corpus: Path, folder: Path) -> list[dict[str, Any]]:
    return train_in(world, run_of(corpus), eager(plan), folder)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2", "dp_shard=2,zero=3"])
def test_every_mesh_gives_the_losses_of_one_process(workers, corpus, tmp_path, plan):
    alone = trained(World(), "", corpus, tmp_path / "alone")
    found = workers.run(2, trained, plan, corpus, tmp_path / "mesh")[0]
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5)


def test_transformers_computes_the_same_from_what_is_exported(tmp_path):
    from transformers import AutoModelForCausalLM

    run = run_of()
    load_family(run)
    model = decoder(**ARCEE)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.shape[0]))
    export_folder(run.model, model.state_dict(), tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == "ArceeForCausalLM"
    tokens = torch.arange(40)[None] * 7 % 400
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_planner_counts_two_matrices():
    run = run_of()
    load_family(run)
    assert parameters(run.model) == sum(p.numel() for p in decoder(**ARCEE).parameters())
    assert Workload.of(run).ffn_matrices == 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"family": "arce"}, 'model.family = "arce": must be one of llama, .* arcee.\n  Try arcee'),
        ({"ffn_gate": True}, "model.ffn_gate = true: the family arcee has no gate; set ffn_gate = false"),
        ({"family": "llama"}, "model.ffn_gate = false: the family llama has a gate; set ffn_gate = true"),
        ({"moe": {"experts": 4}}, "model.moe.experts = 4: experts are SwiGLU"),
    ],
)
def test_what_does_not_fit_the_family_is_refused(model, said):
    with pytest.raises(ValueError, match=said):
        run_of(**model)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x / x.norm()", "mine.py:3: the family mine gives an element another result beside others"),
        ("x * torch.rand(())", "gave two results for the same numbers"),
        ("x.sum(dim=0)", r"returned \[2\] for \[8, 2\]; the shape must stay"),
        ("x.nothing()", "mine.py:4: the family mine raised AttributeError"),
    ],
)
def test_what_an_activation_must_not_do_is_found_before_a_run(body, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\nfrom argosy import extend\n@extend.family('mine')\ndef f(x): return {body}\n")
    with pytest.raises(UserError, match=said):
        load_family(run_of(file=path, family="mine", ffn_gate=True))


def test_a_family_without_a_class_is_not_exported(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from argosy import extend\n@extend.family('mine')\ndef f(x): return x.tanh()\n")
    run = run_of(file=path, family="mine", ffn_gate=True)
    load_family(run)
    with pytest.raises(UserError, match="names no class of transformers"):
        export_folder(run.model, decoder(family="mine").state_dict(), tmp_path / "out")
