"""Bad steps, corrupt replicas and damaged shards in the whole loop: all ranks do alike, and each sample counts once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy import faults
from argosy.chaos.run import read_ledger
from argosy.checkpoint import store
from argosy.config.schema import RunConfig
from argosy.errors import DataError, Retryable, RunFailed
from argosy.models.microbatch import Microbatch
from argosy.observe.events import read_lines
from argosy.observe.heartbeat import BESIDE
from argosy.observe.report import Report
from argosy.parallel.world import World
from argosy.training.bad_steps import MOST_BAD_STEPS
from argosy.training.trainer import Trainer
from argosy.watch.reader import RunReader
from run_folder import events
from tiny import EAGER, eager, losses, run_config, train_in, weights

ALONE = World()
BATCH = 8


def train_with(world: World, run: RunConfig, plan: str, run_dir: Path, text: str) -> list[dict[str, Any]]:
    """Train while the faults of `text` strike."""
    faults.arm(text, run_dir)
    os.environ["RANK"] = str(world.rank)  # some fault points have to ask for it
    try:
        return train_in(world, run, eager(plan), run_dir)
    finally:
        faults.arm("")
        del os.environ["RANK"]


@contextmanager
def poisoned(samples: set[int]) -> Iterator[None]:
    """Whatever step has one of these samples has a loss that is no number."""
    forward_backward = Trainer.forward_backward

    def poison(self: Trainer, batch: list[Microbatch]) -> Tensor:
        loss = forward_backward(self, batch)
        mine = {i for first, stop in self.parts.batches.samples(self.state.step) for i in range(first, stop)}
        return loss * torch.nan if mine & samples else loss

    Trainer.forward_backward = poison
    try:
        yield
    finally:
        Trainer.forward_backward = forward_backward


def train_on_poison(world: World, run: RunConfig, plan: str, run_dir: Path, samples: set[int]) -> list[dict[str, Any]]:
    with poisoned(samples):
        return train_in(world, run, eager(plan), run_dir)


def numbers(records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "first_sample", "validation_loss")
    return [tuple(record.get(key) for key in keys) for record in records]


@pytest.fixture(scope="module")
def undisturbed(workers, corpus, tmp_path_factory) -> list[dict[str, Any]]:
    """The records of three replicas that nothing happened to."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    return workers.run(3, train_in, three(corpus), eager("dp_replicate=3"), run_dir)[0]


def three(corpus: Path, **sections: Any) -> RunConfig:
    return run_config(corpus, **{"train": {"global_batch": 6}, "checkpoint": {"every_steps": 2}, **sections})


def test_the_metrics_are_a_ledger_of_each_sample_once(undisturbed):
    ledger = read_ledger(undisturbed)
    assert (ledger.committed, ledger.skipped, ledger.problems) == (8 * 6, (), ())


@pytest.mark.parametrize(("size", "plan"), [(1, ""), (2, "dp_shard=2"), (2, "pp=2,microbatch=2")])
@pytest.mark.parametrize(
    "fault",
    [
        "nan@gradient:step=3,times=2",
        pytest.param("inf@gradient:step=3,times=2", marks=pytest.mark.slow),
        pytest.param("nan@loss:step=3,times=2", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_not_finite_is_done_with_the_next_samples(workers, corpus, tmp_path, size, plan, fault):
    records = workers.run(size, train_with, run_config(corpus), plan, tmp_path, fault)[0]
    assert [record["step"] for record in records if "loss" in record] == list(range(8))
    ledger = read_ledger(records)
    assert (ledger.committed, ledger.skipped, ledger.problems) == (8 * BATCH, ((24, 32),), ())
    (event,) = events(tmp_path, "bad_step")
    assert (event["step"], event["reason"], event["samples"]) == (3, "not_finite", [[24, 32]])
    assert (event["policy"], event["outcome"]) == ("skip", "skip")


@pytest.mark.parametrize("policy", ["skip", pytest.param("stop", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "fault",
    [
        "nan@gradient:step=3,rank=1",
        pytest.param("inf@loss:step=0,rank=0", marks=pytest.mark.slow),
        "spike@loss:step=7,factor=20",
    ],
)
def test_what_goes_wrong_once_is_done_again_and_changes_nothing(workers, corpus, tmp_path, undisturbed, policy, fault):
    run = three(corpus, resilience={"on_bad_step": policy, "spike_warmup_steps": 4})
    records = workers.run(3, train_with, run, "dp_replicate=3", tmp_path, fault)[0]
    assert numbers(records) == numbers(undisturbed)
    assert not events(tmp_path, "bad_step")
    (event,) = events(tmp_path, "transient")
    record = next(record for record in undisturbed if record["step"] == event["step"] and "loss" in record)
    assert (event["loss"], event["grad_norm"]) == (record["loss"], record["grad_norm"])
    assert (event["first_loss"], event["first_grad_norm"]) != (event["loss"], event["grad_norm"])


def test_a_bad_step_leaves_no_trace_but_the_samples_that_it_had(corpus, tmp_path):
    run = run_config(corpus, checkpoint={"every_steps": 3})
    before = train_on_poison(ALONE, run, "", tmp_path / "one", {25})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    # A run that never met them computes the same: it begins with the checkpoint that knows them as skipped.
    store.remove(store.step_folder(tmp_path / "two", 8))
    again = train_in(ALONE, run, EAGER, tmp_path / "two")
    assert numbers(again) == numbers(before)
    assert read_ledger(again).skipped == ((24, 32),)
    assert all(torch.equal(a, b) for a, b in zip(*map(_weights, ("one", "two"), [tmp_path] * 2), strict=True))


def _weights(name: str, folder: Path) -> list[Tensor]:
    return list(weights(folder / name).values())


@pytest.mark.parametrize(("size", "plan"), [(1, ""), (2, "dp_replicate=2")])
def test_after_bad_steps_in_a_row_the_run_goes_back_and_skips_their_samples(workers, corpus, tmp_path, size, plan):
    run = run_config(corpus, checkpoint={"every_steps": 2}, resilience={"on_bad_step": "rewind", "rewind_after": 2})
    records = workers.run(size, train_on_poison, run, plan, tmp_path, {42, 50})[0]
    assert [record["step"] for record in records if "loss" in record] == list(range(8))
    ledger = read_ledger(records)
    assert (ledger.committed, ledger.skipped, ledger.problems) == (8 * BATCH, ((40, 48), (48, 56)), ())
    assert [event["outcome"] for event in events(tmp_path, "bad_step")] == ["skip", "rewind"]
    (back,) = events(tmp_path, "rewind")
    assert (back["step"], back["to_step"]) == (5, 4)
    assert store.newest_whole(tmp_path).checkpoint.manifest.skipped == ((40, 48), (48, 56))


def test_the_steps_after_going_back_are_those_that_were_there_before(corpus, tmp_path):
    settings = {"on_bad_step": "rewind", "rewind_after": 1}
    run = run_config(corpus, checkpoint={"every_steps": 2}, resilience=settings)
    clean = train_in(ALONE, run, EAGER, tmp_path / "clean")
    records = train_on_poison(ALONE, run, "", tmp_path / "run", {60})  # step 7; the newest checkpoint is that of 6
    assert numbers(records)[:8] == numbers(clean)[:8]


def test_a_run_of_bad_steps_ends_with_what_to_try(corpus, tmp_path):
    run = run_config(corpus, checkpoint={"every_steps": 2, "background": False})
    with pytest.raises(RunFailed, match=rf"last {MOST_BAD_STEPS} steps were not finite.*Try a smaller optimizer\.lr"):
        train_on_poison(ALONE, run, "", tmp_path, set(range(30, 1000)))
    assert store.newest_whole(tmp_path).checkpoint.step == 2


def test_a_run_does_not_go_back_for_ever(corpus, tmp_path):
    settings = {"on_bad_step": "rewind", "rewind_after": 2}
    run = run_config(corpus, checkpoint={"every_steps": 2}, resilience=settings)
    with pytest.raises(RunFailed, match="went back to step 2 2 times"):
        train_on_poison(ALONE, run, "", tmp_path, set(range(30, 1000)))
    assert len(events(tmp_path, "rewind")) == 3


def test_the_policy_stop_ends_the_run(corpus, tmp_path):
    run = run_config(corpus, resilience={"on_bad_step": "stop"})
    with pytest.raises(RunFailed, match="at step 3: the step is not finite"):
        train_on_poison(ALONE, run, "", tmp_path, {24})
    assert events(tmp_path, "bad_step")[0]["outcome"] == "stop"


def test_a_spike_is_seen_by_all_ranks_after_a_restart_too(workers, corpus, tmp_path):
    settings = {"spike_warmup_steps": 4, "loss_spike_sigmas": 10.0}
    run = run_config(corpus, resilience=settings, checkpoint={"every_steps": 3})
    workers.run(2, train_in, run, eager("dp_replicate=2"), tmp_path, 6)
    records = workers.run(2, train_with, run, "dp_replicate=2", tmp_path, "spike@loss:step=6,factor=20,times=2")[0]
    assert read_ledger(records).skipped == ((48, 56),)
    assert [event["reason"] for event in events(tmp_path, "bad_step")] == ["loss_spike"]


def test_an_overflow_in_fp16_is_done_again_with_the_same_samples(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.training.records.matmul_peak_flops", lambda *_: 1e9)  # minutes, in fp16 on a CPU
    run = run_config(corpus, train={"steps": 2, "global_batch": 2})
    records = train_with(ALONE, run, "precision=fp16", tmp_path, "inf@gradient:step=1")
    ledger = read_ledger(records)
    assert (ledger.committed, ledger.skipped, ledger.problems) == (4, (), ()) and not events(tmp_path, "bad_step")
    assert [event["step"] for event in events(tmp_path, "loss_scale")] == [1]


@pytest.mark.parametrize("fault", ["flip@weights:step=3,rank=1,bit=30", "flip@moments:step=4,rank=2,bit=3"])
def test_a_bit_flipped_in_one_of_three_replicas_changes_nothing(workers, corpus, tmp_path, undisturbed, fault):
    records = workers.run(3, train_with, three(corpus), "dp_replicate=3", tmp_path, fault)[0]
    assert numbers(records) == numbers(undisturbed)
    (event,) = events(tmp_path, "corruption")
    struck = int(fault.split("step=")[1][0])
    assert (event["step"], event["outcome"]) == (struck + 1, "healed")
    assert event["ranks"] == [int(fault.split("rank=")[1][0])]


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_of_two_replicas_neither_is_trusted_and_the_run_goes_back(workers, corpus, tmp_path, step):
    run = run_config(corpus, checkpoint={"every_steps": 2})
    clean = workers.run(2, train_in, run, eager("dp_replicate=2"), tmp_path / "clean")[0]
    fault = f"flip@weights:step={step},rank=1,bit=22"
    records = workers.run(2, train_with, run, "dp_replicate=2", tmp_path / "run", fault)[0]
    assert numbers(records) == numbers(clean)
    (event,) = events(tmp_path / "run", "corruption")
    assert (event["ranks"], event["outcome"]) == ([0, 1], "rolled_back")
    assert [back["to_step"] for back in events(tmp_path / "run", "rewind")] == [2]


def test_a_corrupt_state_with_nothing_to_go_back_to_is_not_gone_on_with(workers, corpus, tmp_path):
    with pytest.raises(AssertionError, match="no checkpoint was saved yet"):
        workers.run(2, train_with, run_config(corpus), "dp_replicate=2", tmp_path, "flip@weights:step=3,rank=1,bit=22")
    assert issubclass(Retryable, Exception) and store.newest_whole(tmp_path) is None


@pytest.mark.parametrize(
    "fault", ["flip@bucket:rank=0,bit=1", pytest.param("nan@loss:step=0,rank=0", marks=pytest.mark.slow)]
)
def test_a_gradient_that_others_cannot_reproduce_is_computed_again(workers, corpus, tmp_path, undisturbed, fault):
    run = three(corpus, resilience={"replay_check_every_steps": 2})
    records = workers.run(3, train_with, run, "dp_replicate=3", tmp_path, fault)[0]
    assert numbers(records) == numbers(undisturbed)
    (event,) = events(tmp_path, "gradient_corrupt")
    assert (event["step"], event["rank"], event["suspects"]) == (0, 0, [0])


def test_of_two_both_are_suspects(workers, corpus, tmp_path):
    run = run_config(corpus, resilience={"replay_check_every_steps": 1})
    workers.run(2, train_with, run, "dp_replicate=2,microbatch=2", tmp_path, "flip@bucket:rank=0,bit=0")
    assert [event["suspects"] for event in events(tmp_path, "gradient_corrupt")] == [[0, 1]]


def test_the_time_of_a_check_is_recorded_beside_the_step_and_not_as_a_part_of_it(workers, corpus, tmp_path):
    run = run_config(corpus, resilience={"replay_check_every_steps": 2})
    lines = workers.run(2, train_in, run, eager("dp_replicate=2"), tmp_path)[0]
    for line in (line for line in lines if "loss" in line):
        assert ("check" in line["seconds"]) is (line["step"] % 2 == 0)
        beside = sum(line["seconds"].get(name, 0.0) for name in BESIDE)
        assert line["step_time_s"] == pytest.approx(line["seconds"]["step"] - beside, abs=1e-5)


@pytest.mark.parametrize("plan", ["dp_replicate=2", pytest.param("dp_shard=2,zero=1", marks=pytest.mark.slow)])
def test_a_sum_of_gradients_that_does_not_fit_its_checksum_is_made_again(workers, corpus, tmp_path, plan):
    clean = workers.run(2, train_in, run_config(corpus), eager(plan), tmp_path / "clean")[0]
    run = run_config(corpus, resilience={"check_collectives": True})
    records = workers.run(2, train_with, run, plan, tmp_path / "run", "flip@bucket:rank=1,bit=30")[0]
    assert numbers(records) == numbers(clean)
    files = (tmp_path / "run" / "events").glob("rank-*.jsonl")
    assert any(event["event"] == "collective_corrupt" for file in files for event in read_lines(file))


EXPERTS = {"moe": {"experts": 4, "expert_ffn_width": 32, "balance": "bias"}}


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        pytest.param("dp_replicate=2,dp_shard=2", {}, marks=pytest.mark.slow),
        ("tp=2,dp_replicate=2", {}),
        pytest.param("tp=2,dp_shard=2,zero=1", {"qk_norm": True, "family": "qwen3"}, marks=pytest.mark.slow),
        pytest.param("pp=2,dp_replicate=2,microbatch=2", {"tie_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("cp=2,dp_replicate=2,zero=0", {}, marks=pytest.mark.slow),
        pytest.param("dp_shard=2,ep=2,dp_replicate=2", EXPERTS, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,weights=bf16,precision=bf16", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_replicas_of_a_healthy_run_stay_equal_under_any_layout(workers, corpus, tmp_path, plan, model, kind):
    run = run_config(corpus, model=model, train={"steps": 3}, optimizer={"kind": kind})
    workers.run(eager(plan).world_size, train_in, run, eager(plan), tmp_path)
    assert not events(tmp_path, "corruption") and len(events(tmp_path, "end")) == 1


def test_without_fingerprints_nothing_is_compared(workers, corpus, tmp_path):
    run = run_config(corpus, resilience={"fingerprint_every_steps": 0})
    workers.run(2, train_with, run, "dp_replicate=2", tmp_path, "flip@weights:step=3,rank=1,bit=2")
    assert not events(tmp_path, "corruption")


def test_a_run_pauses_where_it_is_told_and_goes_on_as_if_it_had_not(corpus, tmp_path):
    whole = train_in(ALONE, run_config(corpus), EAGER, tmp_path / "whole")
    paused = train_in(ALONE, run_config(corpus, train={"pause_at": 5}), EAGER, tmp_path / "run")
    assert len(losses(paused)) == 5 and Report.load(tmp_path / "run").status == "stopped"
    reader = RunReader.read(tmp_path / "run")
    assert (reader.state, reader.why) == ("stopped", "paused at step 5, as train.pause_at says; its state is saved")
    assert numbers(train_in(ALONE, run_config(corpus), EAGER, tmp_path / "run")) == numbers(whole)


def test_a_damaged_shard_ends_the_run_and_says_which_samples(sharded, tmp_path):
    with pytest.raises(DataError, match=r"train-00001\.bin"):
        train_in(ALONE, run_config(sharded), EAGER, tmp_path)
    (event,) = events(tmp_path, "bad_shard")
    assert event["outcome"] == "stop" and event["samples"][0][1] - event["samples"][0][0] == BATCH


def test_a_damaged_shard_is_left_out_by_all_ranks(workers, sharded, tmp_path):
    run = run_config(sharded, data={"on_bad_shard": "skip"})
    replayed = run_config(sharded, data={"on_bad_shard": "skip"}, resilience={"replay_check_every_steps": 1})
    records = workers.run(2, train_in, replayed, eager("dp_replicate=2"), tmp_path / "two")[0]
    assert not events(tmp_path / "two", "gradient_corrupt")
    ledger = read_ledger(records)
    assert (ledger.committed, ledger.problems) == (8 * BATCH, ())
    alone = train_in(ALONE, run, EAGER, tmp_path / "one")
    assert losses(alone) == pytest.approx(losses(records), rel=1e-5)
    assert events(tmp_path / "one", "bad_shard")[0]["outcome"] == "quarantined"
    assert sum(len(event["samples"]) for event in events(tmp_path / "one", "samples_replaced")) > 0
