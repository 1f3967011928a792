"""The promises of the main loop: the same numbers on any mesh, and after any stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy.checkpoint import store
from argosy.config.schema import RunConfig
from argosy.errors import RunFailed
from argosy.models.decoder import Decoder
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.loop import train
from argosy.training.stop import StopSignal
from tiny import run_config, train_in
from workers import WorkerPool

EAGER = {"compile": False}


def losses(records: list[dict]) -> list[float]:
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss curve of one process that nothing stopped."""
    return losses(train_in(World(), run_config(corpus), Plan(**EAGER), tmp_path_factory.mktemp("reference")))


def test_the_loss_falls(reference: list[float]) -> None:
    assert len(reference) == 8
    assert reference[-1] < reference[0] - 0.3


@pytest.mark.parametrize("plan", ["microbatch=2", "microbatch=8", "dp_replicate=2", "dp_replicate=2,microbatch=4", "dp_replicate=4"])
def test_every_plan_gives_the_losses_of_one_process(
    workers: WorkerPool, corpus: Path, reference: list[float], tmp_path: Path, plan: str
) -> None:
    layout = Plan.parse(plan).model_copy(update=EAGER)
    records = workers.run(layout.world_size, train_in, run_config(corpus), layout, tmp_path)[0]
    assert losses(records) == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("stop_after", [1, 3, 7])
def test_a_resumed_run_repeats_the_losses_bit_for_bit(
    corpus: Path, reference: list[float], tmp_path: Path, stop_after: int
) -> None:
    run = run_config(corpus, checkpoint={"every_steps": 1, "every_minutes": 0})
    stopped = run.model_copy(update={"train": run.train.model_copy(update={"steps": 8})})
    interrupt_after(stopped, stop_after, tmp_path)
    assert losses(train_in(World(), run, Plan(**EAGER), tmp_path)) == reference


def interrupt_after(run: RunConfig, steps: int, run_dir: Path) -> None:
    """Train until `steps` are done, as a signal would end it."""
    stop = StopSignal()

    class Counting(StopSignal):
        pass

    original = Decoder.forward
    calls = 0

    def counted(self: Decoder, tokens, targets=None, *rest):
        nonlocal calls
        if torch.is_grad_enabled():
            calls += 1
            if calls == steps * run.train.global_batch:
                stop.number = 15
        return original(self, tokens, targets, *rest)

    Decoder.forward = counted  # type: ignore[method-assign]
    try:
        train(run, Plan(**EAGER), World(), run_dir, stop)
    finally:
        Decoder.forward = original  # type: ignore[method-assign]


def test_a_run_saved_by_two_processes_goes_on_with_one(
    workers: WorkerPool, corpus: Path, reference: list[float], tmp_path: Path
) -> None:
    half = run_config(corpus, train={"steps": 4, "global_batch": 8}, schedule={"warmup_steps": 2, "kind": "constant"})
    whole = run_config(corpus, schedule={"warmup_steps": 2, "kind": "constant"})
    two = Plan(dp_replicate=2, **EAGER)
    workers.run(2, train_in, half, two, tmp_path / "a")
    resumed = losses(train_in(World(), whole, Plan(**EAGER), tmp_path / "a"))
    assert resumed == pytest.approx(losses(train_in(World(), whole, Plan(**EAGER), tmp_path / "b")), rel=1e-5)


def test_steps_that_are_not_finite_end_the_run_before_they_touch_the_weights(corpus: Path, tmp_path: Path) -> None:
    run = run_config(corpus, optimizer={"lr": 1e30, "grad_clip": 0.0}, checkpoint={"every_steps": 1, "every_minutes": 0})
    with pytest.raises(RunFailed, match="not finite"):
        train(run, Plan(**EAGER), World(), tmp_path, StopSignal())
    assert store.committed(tmp_path)
