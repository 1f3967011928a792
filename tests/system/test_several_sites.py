"""Runs of several sites, as a user starts them: what they come to, and who is let in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.config.load import load
from argosy.data.loader import open_data
from argosy.models.microbatch import microbatches
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.schedule import learning_rate_factor
from argosy.training.state import TrainState
from argosy.training.step import Step
from commands import Folder
from several_sites import H, SitesOfARun, several_sites
from waiting import PATIENT_S


@pytest.fixture
def sites(folder: Folder) -> Iterator[Callable[..., SitesOfARun]]:
    """Runs of several sites."""
    with several_sites(folder) as make:
        yield make


class PlainSite:
    """One site of the simulation: a model and its inner optimizer, which knows nothing of other sites."""

    def __init__(self, run_dir: Path):
        self.run = load(run_dir / "run.toml")
        plan = Plan(compile=False, microbatch=2)
        self.state = TrainState.begin(apply(plan, self.run, World()), plan, self.run)
        self.values = {piece.name: piece.value for piece in self.state.model.pieces}

    def train(self, rows: Any, eod_id: int) -> float:
        """Make a step with these rows, its whole batch; returns the loss."""
        whole = self.run.train.model_copy(update={"global_batch": len(rows)})
        run = self.run.model_copy(update={"train": whole})
        step = Step(run, self.state, World(), StepClock(World().device))
        factor = learning_rate_factor(self.state.step, run.train.steps, run.schedule)
        loss = step.forward_backward(microbatches(rows, 2, eod_id, World().device))
        outcome = step.exchange(loss)
        step.apply(step.update(outcome, run.optimizer.lr * factor))
        return outcome.loss


def simulated(run_dir: Path, names: str, steps: int, h: int, lr: float, momentum: float) -> dict[str, torch.Tensor]:
    """DiLoCo, written plainly in one process: inner loops that take turns, and Nesterov's SGD on the mean change."""
    inner = [PlainSite(run_dir) for _ in names]
    run = inner[0].run
    data = open_data(run.data, run.seed, 8)
    loader = data.loader(slice(0, 8))
    agreed = {name: value.clone() for name, value in inner[0].values.items()}
    velocity = {name: torch.zeros_like(value) for name, value in agreed.items()}
    rows_each = 8 // len(names)
    for step in range(steps):
        rows = loader.batch(step)
        for place, site in enumerate(inner):
            site.train(rows[place * rows_each : (place + 1) * rows_each], data.eod_id)
        if (step + 1) % h and step + 1 < steps:
            continue
        for name, value in agreed.items():
            change = sum((value - site.values[name]) / len(names) for site in inner)
            velocity[name] = momentum * velocity[name] + change
            value.sub_(lr * (change + momentum * velocity[name]))
            for site in inner:
                site.values[name].copy_(value)
    loader.close()
    return agreed


@pytest.mark.slow
@pytest.mark.parametrize(("word", "lr", "momentum"), [("diloco", 0.7, 0.9), ("local", 1.0, 0.0)])
def test_sites_come_to_the_weights_of_a_simulation_in_one_process(
    folder: Folder, word: str, lr: float, momentum: float
) -> None:
    run = SitesOfARun(folder, steps=2 * H + 1, word=word, with_addresses=False)  # the last round is shorter
    said = folder.argosy("train", "run.toml")
    assert "A | " in said and "B | " in said and "done" in said
    ledger = run.check_ledger()
    assert [list(line.tokens) for line in ledger.lines] == [["A", "B"]] * 3
    got = run.same_weights()
    wanted = simulated(run.path("A"), "AB", 2 * H + 1, H, lr, momentum)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
    lines = [json.loads(line) for line in (run.path("B") / "metrics.jsonl").read_text().splitlines()]
    outer = [line["sites"] for line in lines if "sites" in line]
    assert [one["round"] for one in outer] == [0, 1, 2]
    assert all(set(one) >= {"sent_bytes", "received_bytes", "seconds", "norms", "cosines", "ratio"} for one in outer)


@pytest.mark.slow
def test_a_stranger_is_refused_and_the_run_goes_on(sites: Callable[..., SitesOfARun]) -> None:
    run = sites(steps=2 * H)
    first = run.start("A")
    stranger = run.start("B", ARGOSY_SECRET="0" * 64)
    run.wait(lambda: any(event["event"] == "site_refused" for event in run.events("A")))
    run.kill(stranger)
    shutil.rmtree(run.path("B"))
    assert first.poll() is None
    run.start("B")
    said, problem = first.communicate(timeout=PATIENT_S)
    assert first.returncode == 0, said + problem
    assert "is not let in" in said + problem
    run.check_ledger()
