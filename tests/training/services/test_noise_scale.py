"""The gradient noise scale, against gradients that are computed one part at a time in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.microbatch import Microbatch, microbatches
from argosy.observe.events import Metrics
from argosy.parallel.world import World
from argosy.training.services.noise_scale import Smoothed, estimate
from argosy.training.trainer import Trainer
from tiny import eager, losses, run_config, train_in

BATCH = 8


def noisy(corpus: Path, every: int = 1, **sections: Any) -> RunConfig:
    return run_config(corpus, **{**sections, "observe": {"noise_scale_every_steps": every}})


def squares(run: RunConfig, part: int, left_out: Callable[[str], bool]) -> tuple[float, float]:
    """The mean squared norm of the first step's gradient over parts of so many sequences, and that of the whole."""
    model = Decoder(run.model)
    materialize(model, run.model, torch.device("cpu"), run.seed)
    data = open_data(run.data, run.seed, BATCH)
    rows = data.loader(slice(0, BATCH)).read(0)

    def squared(some: Any) -> float:
        model.zero_grad()
        (micro,) = microbatches(some, len(some), data.eod_id, torch.device("cpu"))
        loss = model(micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents)
        (loss / micro.targets_BT.numel()).backward()
        return sum(float(p.grad.square().sum()) for n, p in model.named_parameters() if not left_out(n))

    parts = [squared(rows[i : i + part]) for i in range(0, BATCH, part)]
    return sum(parts) / len(parts), squared(rows)


def of_first_step(records: list[dict[str, Any]]) -> tuple[float, float]:
    noise = next(record["noise"] for record in records if "noise" in record)
    return noise["gradient_squared"], noise["variance"]


def nothing(name: str) -> bool:
    return False


def is_norm(name: str) -> bool:
    return "norm" in name


@pytest.mark.parametrize(
    ("plan", "part", "left_out"),
    [
        ("dp_replicate=2,microbatch=2", 4, nothing),
        ("dp_shard=2,zero=2,microbatch=4", 4, nothing),
        pytest.param("dp_shard=4,zero=1,microbatch=1", 2, nothing, marks=pytest.mark.slow),
        ("dp_shard=2,tp=2,zero=1,microbatch=2", 4, is_norm),
        ("dp_replicate=2,pp=2,microbatch=1", 4, nothing),
        ("dp_replicate=2,microbatch=2,precision=fp16", 4, nothing),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_both_parts_are_those_of_gradients_of_parts_and_of_the_whole(workers, corpus, tmp_path, plan, part, left_out):
    run, laid_out = noisy(corpus, train={"steps": 1}), eager(plan)
    records = workers.run(laid_out.world_size, train_in, run, laid_out, tmp_path)[0]
    small, big = squares(run, part, left_out)
    tolerance = 0.03 if "fp16" in plan else 1e-4
    assert of_first_step(records) == pytest.approx(estimate(small, big, part, BATCH), rel=tolerance)


def test_a_plan_for_what_is_left_that_cannot_have_it_trains_without(corpus, tmp_path):
    run = noisy(corpus, train={"steps": 2})
    records = train_in(World(), run, eager("microbatch=8"), tmp_path)
    assert len(losses(records)) == 2 and not any("noise" in record for record in records)


EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 16, "balance": "none"}}


@pytest.mark.parametrize(
    ("plan", "rows", "model"),
    [
        ("dp_shard=2,zero=3,microbatch=2", (0, 1, 4, 5), {}),
        pytest.param("dp_shard=2,tp=2,zero=3,microbatch=1", (0, 4), {}, marks=pytest.mark.slow),
        ("cp=2,microbatch=4", (0, 1, 2, 3), {}),
        pytest.param("dp_shard=2,cp=2,zero=3,microbatch=2", (0, 1, 4, 5), {}, marks=pytest.mark.slow),
        ("dp_shard=2,ep=2,zero=1,microbatch=2", (0, 1, 4, 5), EXPERTS),
        ("dp_shard=2,zero=3,microbatch=2,precision=fp16", (0, 1, 4, 5), {}),
    ],
)
def test_without_own_gradients_the_part_is_the_first_microbatch_of_all_ranks(
    workers, corpus, tmp_path, plan, rows, model
):
    run, laid_out = noisy(corpus, train={"steps": 1}, model=model), eager(plan)
    records = workers.run(laid_out.world_size, train_in, run, laid_out, tmp_path)[0]
    small, big = squares_of_rows(run, rows), squares_of_rows(run, tuple(range(BATCH)))
    tolerance = 0.03 if "fp16" in plan else 1e-4
    assert of_first_step(records) == pytest.approx(estimate(small, big, len(rows), BATCH), rel=tolerance)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("dp_shard=2,zero=3,microbatch=2", {}),
        pytest.param(
            "dp_shard=2,ep=2,microbatch=2",
            {"moe": {"experts": 4, "expert_ffn_width": 16, "balance": "bias"}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_gradient_that_is_computed_once_more_changes_nothing(workers, corpus, tmp_path, plan, model):
    laid_out, sections = eager(plan), {"model": model, "train": {"steps": 4}}
    plain = workers.run(2, train_in, run_config(corpus, **sections), laid_out, tmp_path / "plain")[0]
    noise = workers.run(2, train_in, noisy(corpus, **sections), laid_out, tmp_path / "noisy")[0]
    assert losses(plain) == losses(noise)
    assert [record.get("experts") for record in plain] == [record.get("experts") for record in noise]


def squares_of_rows(run: RunConfig, rows: tuple[int, ...]) -> float:
    """The squared norm of the first step's gradient over some of its sequences."""
    model = Decoder(run.model)
    materialize(model, run.model, torch.device("cpu"), run.seed)
    data = open_data(run.data, run.seed, BATCH)
    some = data.loader(slice(0, BATCH)).read(0)[list(rows)]
    (micro,) = microbatches(some, len(some), data.eod_id, torch.device("cpu"))
    loss = model(micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents)
    (loss / micro.targets_BT.numel()).backward()
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


def test_one_process_compares_its_first_microbatch(corpus, tmp_path):
    run = noisy(corpus, train={"steps": 1})
    records = train_in(World(), run, eager("microbatch=2"), tmp_path)
    _, big = squares(run, BATCH, nothing)
    model_part = squares_of_rows(run, (0, 1))
    assert of_first_step(records) == pytest.approx(estimate(model_part, big, 2, BATCH), rel=1e-4)


def test_what_is_trained_stays_the_same_and_only_steps_that_are_due_tell(corpus, tmp_path):
    plan = eager("microbatch=2")
    plain = train_in(World(), run_config(corpus), plan, tmp_path / "plain")
    noise = train_in(World(), noisy(corpus, every=3), plan, tmp_path / "noisy")
    assert losses(plain) == losses(noise)
    assert [record["step"] for record in noise if "noise" in record] == [2, 5]
    assert [record["noise"]["estimates"] for record in noise if "noise" in record] == [1, 2]


def test_a_step_that_is_done_again_counts_once(corpus, tmp_path, monkeypatch):
    plan, run, forward_backward = eager("microbatch=2"), noisy(corpus), Trainer.forward_backward
    plain = train_in(World(), run, plan, tmp_path / "plain")
    wrong = {2}

    def flipped(self: Trainer, batch: list[Microbatch]) -> Tensor:
        loss = forward_backward(self, batch)
        is_wrong = self.state.step in wrong
        wrong.discard(self.state.step)
        return loss * torch.nan if is_wrong else loss

    monkeypatch.setattr(Trainer, "forward_backward", flipped)
    again = train_in(World(), run, plan, tmp_path / "again")
    assert not wrong and [r["noise"] for r in again if "noise" in r] == [r["noise"] for r in plain if "noise" in r]


def test_a_run_that_was_stopped_goes_on_with_its_averages(corpus, tmp_path):
    plan, run = eager("microbatch=2"), noisy(corpus)
    whole = train_in(World(), run, plan, tmp_path / "whole")
    train_in(World(), run, plan, tmp_path / "cut", stop_after=4)
    cut = train_in(World(), run, plan, tmp_path / "cut")
    assert [r["noise"] for r in cut if "noise" in r] == [r["noise"] for r in whole if "noise" in r]


@pytest.mark.parametrize("sync", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_sums_that_lose_little_give_nearly_the_same_noise(workers, corpus, tmp_path, sync):
    run = noisy(corpus, train={"steps": 1}, sync={"min_elements": 0})
    plans = (eager("dp_replicate=2,microbatch=2"), eager(f"dp_replicate=2,microbatch=2,sync={sync}"))
    exact, lossy = (workers.run(2, train_in, run, plan, tmp_path / str(plan))[0] for plan in plans)
    assert of_first_step(lossy) == pytest.approx(of_first_step(exact), rel=0.01)
    assert of_first_step(lossy) != of_first_step(exact)


def test_the_averages_go_on_however_rare_estimates_are(tmp_path):
    metrics = Metrics(tmp_path)
    line = {"gradient_squared": 2.0, "variance": 6.0, "estimates": 5}
    for step in range(4000):
        metrics.write({"step": step, "loss": 1.0} | ({"noise": line} if step == 1499 else {}))
    assert Smoothed.newest(metrics, 4000, every=1500) == Smoothed(2.0, 6.0, 5)
    assert Smoothed.newest(metrics, 4000, every=1) == Smoothed()


def test_the_estimates_have_no_bias():
    generator = torch.Generator().manual_seed(0)
    signal, spread, found = torch.tensor([0.3, -0.1]), torch.tensor([1.0, 2.0]), Smoothed()
    pairs = []
    for _ in range(4000):
        samples = signal + spread * torch.randn(16, 2, generator=generator)
        small = samples.view(4, 4, 2).mean(1).square().sum(1).mean()
        pairs.append(estimate(float(small), float(samples.mean(0).square().sum()), 4, 16))
        found = found.with_estimate(*pairs[-1])
    mean_signal, mean_variance = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    assert mean_signal == pytest.approx(0.1, abs=0.02)
    assert mean_variance == pytest.approx(5.0, rel=0.03)
    assert found.estimates == 4000
