"""Two runs compared: what differs is found, named, and weighed."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.save import Saver
from argosy.checkpoint.shards import wholes
from argosy.compare.parity import TOLERANCE, Difference, Differences, compare, parity
from argosy.config.schema import RunConfig
from argosy.errors import RunFailed, UserError
from argosy.inference.trained_model import open_checkpoint
from argosy.parallel.world import World
from argosy.training.schedule import learning_rate
from tiny import run_config

SAME = Difference(0.0, "step 0")


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to change."""
    return shutil.copytree(trained, tmp_path / "copy")


def edit_steps(run_dir: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_run_and_its_copy_are_alike(trained: Path, copy: Path) -> None:
    found = compare(trained, copy)
    assert all(difference.relative == 0.0 for difference in vars(found).values())
    assert not found.beyond(0.0)


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
def test_the_step_that_differs_most_is_named(trained: Path, copy: Path, key: str) -> None:
    def change(record: dict[str, Any]) -> None:
        if key in record and record["step"] in (3, 7):
            record[key] *= 1 + record["step"] / 1000

    edit_steps(copy, change)
    found = compare(trained, copy)
    assert getattr(found, key).relative == pytest.approx(7e-3) and getattr(found, key).where == "step 7"
    assert set(found.beyond(TOLERANCE)) == {key}


def test_a_loss_that_is_not_finite_is_infinitely_far(trained: Path, copy: Path) -> None:
    edit_steps(copy, lambda record: record.update(loss=math.nan) if record["step"] == 2 and "loss" in record else None)
    assert compare(trained, copy).loss == Difference(math.inf, "step 2")
    assert compare(copy, trained).loss == Difference(math.inf, "step 2")


def test_the_weight_that_differs_most_is_named(trained: Path, copy: Path) -> None:
    opened = open_checkpoint(trained)
    state = opened.model(torch.device("cpu")).state_dict()
    name = "blocks.1.mlp.up.weight"
    state[name] = state[name] * 1.01
    shutil.rmtree(copy / "checkpoints")
    manifest = CheckpointManifest(
        step=40, tokens=0, saved_at_s=time.time(), plan="", data_identity="", has_optimizer=False, files={}
    )
    saver = Saver(copy, World(), lambda news, **facts: None)
    saver.save(wholes(state, "model."), manifest)
    saver.close()
    found = compare(trained, copy)
    assert found.weights.relative == pytest.approx(0.01, rel=1e-4) and found.weights.where == name


def test_runs_of_other_lengths_are_not_compared(trained: Path, copy: Path) -> None:
    path = copy / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(RunFailed, match="steps"):
        compare(trained, copy)


def test_norms_and_weights_are_granted_more_than_the_loss() -> None:
    def beyond(relative: float) -> set[str]:
        apart = Difference(relative, "")
        return set(Differences(apart, apart, apart).beyond(1e-5))

    assert beyond(0.9e-5) == set()
    assert beyond(2e-5) == {"loss"}
    assert beyond(2e-4) == {"loss", "grad_norm"}
    assert beyond(2e-3) == {"loss", "grad_norm", "weights"}


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("auto", "write down the layout"),
        ("tp=3", "does not divide model.heads = 4"),
        ("pp=2,schedule=zbv", "each stage needs a layer"),
        ("tp=two", 'plan.tp = "two"'),
    ],
)
def test_a_plan_that_the_run_cannot_use_is_refused_before_anything_starts(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, plan: str, said: str
) -> None:
    monkeypatch.setattr("argosy.compare.parity.train", lambda *_, **__: pytest.fail("it started"))
    run = run_config(corpus).model_copy(update={"plan": plan})
    with pytest.raises(UserError, match=said):
        parity(run)


def test_only_the_steps_of_a_run_are_compared_on_this_machine(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[RunConfig] = []
    monkeypatch.setattr("argosy.compare.parity.train", lambda run, *_, **__: trained.append(run))
    monkeypatch.setattr("argosy.compare.parity.compare", lambda *_: Differences(SAME, SAME, SAME))
    run = run_config(
        corpus,
        train={"pause_at": 3},
        schedule={"warmup_fraction": 0.5},
        resilience={"replay_check_every_steps": 2},
        evaluate={"tasks": ["arc_easy"]},
        checkpoint={"remote": "s3://bucket/runs"},
        observe={"noise_scale_every_steps": 1, "profile": {"steps": "5:7"}},
        launch={"nodes": 2, "lease": "folder"},
    )
    parity(run.model_copy(update={"plan": "dp_replicate=2"}))
    assert len(trained) == 2
    for each in trained:
        assert not each.train.pause_at and not each.resilience.replay_check_every_steps and not each.evaluate.tasks
        assert (
            not each.checkpoint.remote and not each.observe.noise_scale_every_steps and not each.observe.profile.steps
        )
        assert each.launch.nodes == 1 and not each.launch.lease
        assert learning_rate(each, step=0, steps=5) == each.optimizer.lr


@pytest.mark.parametrize("words, tolerance", [("zero=1", TOLERANCE), ("sync=int8", None), ("reduce=bf16", None)])
def test_a_plan_that_rounds_more_than_fp32_has_no_limit(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, words: str, tolerance: float | None
) -> None:
    monkeypatch.setattr("argosy.compare.parity.train", lambda *_, **__: None)
    monkeypatch.setattr("argosy.compare.parity.compare", lambda *_: Differences(SAME, SAME, SAME))
    run = run_config(corpus).model_copy(update={"plan": f"dp_replicate=2,{words}"})
    assert parity(run).tolerance == tolerance


def test_a_run_of_no_steps_is_refused(corpus: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        parity(run_config(corpus).model_copy(update={"plan": "tp=2"}), steps=0)
