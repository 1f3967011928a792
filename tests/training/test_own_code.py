"""Losses and optimizers of the user's keep the promises: the same numbers on any mesh, and after any stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.errors import UserError
from argosy.parallel.world import World
from argosy.plan.cost.exact_state import state_bytes
from argosy.training.parts import check_user_code
from argosy.training.state import TrainState
from tiny import EAGER, eager, laid_out, losses, run_config, train_in

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "extend"
OWN = {
    "train": {"steps": 6, "loss": "z_loss"},
    "optimizer": {"kind": "sgd", "lr": 0.5},
    "extend": {"files": (EXAMPLES / "losses.py", EXAMPLES / "optimizers.py")},
    "model": {"vocab_size": 401},  # no number of ranks divides it
    "evaluate": {"every_steps": 3},
}


def trained(world: World, plan: str, corpus: Path, folder: Path, stop_after: int | None = None) -> list[dict[str, Any]]:
    return train_in(world, run_config(corpus, **OWN), eager(plan), folder, stop_after)


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """The records of one process."""
    return trained(World(), "", corpus, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "plan", [pytest.param("dp_shard=2,zero=2", marks=pytest.mark.slow), "dp_shard=2,zero=3", "tp=2", "pp=2", "cp=2"]
)
def test_every_mesh_gives_the_losses_of_one_process(workers, corpus, tmp_path, alone, plan):
    found = workers.run(2, trained, plan, corpus, tmp_path)[0]
    assert losses(found) == pytest.approx(losses(alone), rel=1e-5)
    scores = [[r["validation_loss"] for r in records if "validation_loss" in r] for records in (found, alone)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)


def test_held_out_text_is_scored_by_the_cross_entropy(corpus, tmp_path, alone):
    run = run_config(corpus, **OWN | {"train": {"steps": 6, "loss": "cross_entropy"}, "optimizer": {"lr": 1e-9}})
    plain = train_in(World(), run, EAGER, tmp_path)
    by_loss = [losses(records)[0] for records in (alone, plain)]
    assert by_loss[0] == pytest.approx(by_loss[1] + 1e-4 * 36, rel=1e-3)  # log 401 is 6
    assert next(r["validation_loss"] for r in alone if "validation_loss" in r) < by_loss[1]


def test_a_stopped_run_goes_on_bit_for_bit(workers, corpus, tmp_path):
    plan = "dp_shard=2,zero=2"
    whole = workers.run(2, trained, plan, corpus, tmp_path / "whole")[0]
    workers.run(2, trained, plan, corpus, tmp_path / "cut", 3)
    cut = workers.run(2, trained, plan, corpus, tmp_path / "cut")[0]
    assert losses(cut) == losses(whole)


def test_the_planner_knows_what_the_optimizer_keeps():
    run = run_config(Path("no data"), **OWN)
    state = TrainState.begin(laid_out(World(), EAGER, **OWN), EAGER, run)
    for piece in state.optimizer.pieces:
        state.optimizer.state_of(piece)
    assert state.optimizer.state_bytes == state_bytes(EAGER, run).optimizer > 0


NOISY = """
import torch
from argosy import extend

@extend.optimizer("noisy", deterministic=False)
def noisy(update):
    update.weight.add_(torch.rand_like(update.weight), alpha=-update.lr)

@extend.loss("noisy", deterministic=False)
def loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none") * torch.rand(())
"""


@pytest.mark.parametrize(
    ("plan", "sections", "said"),
    [
        ("dp_replicate=2", {"optimizer": {"kind": "noisy"}}, "Try dp_shard=2,zero=1"),
        ("tp=2", {"train": {"loss": "noisy"}}, "Try tp=1"),
        (
            "dp_replicate=2",
            {"train": {"loss": "noisy"}, "resilience": {"replay_check_every_steps": 2}},
            "replay_check_every_steps = 2: the loss noisy",
        ),
    ],
)
def test_what_does_not_repeat_itself_is_refused_where_ranks_must_agree(tmp_path, plan, sections, said):
    (tmp_path / "noisy.py").write_text(NOISY)
    run = run_config(Path("no data"), extend={"files": (tmp_path / "noisy.py",)}, **sections)
    with pytest.raises(UserError, match=said):
        check_user_code(run, eager(plan))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"optimizer": {"kind": "sdg"}},
            'optimizer.kind = "sdg": must be one of adamw, lion, muon, .* declares: sgd.\n  Try sgd',
        ),
        ({"train": {"loss": "zloss"}}, 'train.loss = "zloss": must be one of cross_entropy, .* z_loss.\n  Try z_loss'),
        (
            {"optimizer": {"kind": "sgd", "state": "int8"}},
            'optimizer.state = "int8": an optimizer of your own keeps fp32',
        ),
        (
            {"optimizer": {"kind": "sgd"}, "model": {"mup": {"base_width": 16}}},
            "model.mup.base_width = 16: how the step of an optimizer of your own grows",
        ),
    ],
)
def test_a_name_that_nothing_declares_is_refused_with_the_near_ones(sections, said):
    with pytest.raises(ValueError, match=said):
        run_config(Path("no data"), extend=OWN["extend"], **sections)
