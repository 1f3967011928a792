"""Asynchronous training: with one worker it is plain training, bit for bit; with more each sample counts once."""

from __future__ import annotations

import json
import os
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from argosy import faults
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.weights import write_weights
from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig
from argosy.data.loader import open_data
from argosy.errors import UserError
from argosy.models.lazy_weights import HeldWeights
from argosy.observe.clock import StepClock
from argosy.observe.events import Events, Metrics, read_lines
from argosy.observe.report import Report
from argosy.parallel.apply import apply
from argosy.parallel.world import World
from argosy.processes.secret import secret_of
from argosy.sync.client import Client, WorkerStopped
from argosy.sync.layout import ServerLayout
from argosy.training.batches import Batches
from argosy.training.loop import train
from argosy.training.schedule import learning_rate_factor
from argosy.training.server.main import ParameterServer
from argosy.training.state import TrainState
from argosy.training.step import Step
from argosy.training.stop import StopSignal
from parameter_servers import asynchronous, serving, together, work
from tiny import MODEL, decoder, eager, losses, train_in, weights


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]


def events(run_dir):
    return [event["event"] for event in read_lines(run_dir / "events/rank-0.jsonl")]


@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_is_plain_training_bit_for_bit(corpus, tmp_path, servers):
    run = asynchronous(corpus, servers)
    with serving(run, tmp_path / "async"):
        assert work(run, tmp_path / "async", "A")
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    records = train_in(World(), plain, eager("microbatch=4"), tmp_path / "plain")
    ours = Metrics(tmp_path / "async").read()
    assert losses(ours) == losses(records)
    assert [line["lr"] for line in ours if "lr" in line] == [line["lr"] for line in records if "lr" in line]
    expected, found = weights(tmp_path / "plain"), weights(tmp_path / "async")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {line["staleness"] for line in lines(tmp_path / "async")} == {0}


def test_workers_take_over_what_no_run_trains_too(corpus, tmp_path):
    model = decoder(layer_scale=True)
    for block in model.blocks.values():
        torch.nn.init.constant_(block.layer_scale, 0.5)
    about = {"step": 0, "tokens": 0, "saved_at_s": 0.0, "plan": "", "data_identity": "", "has_optimizer": False}
    write_weights(tmp_path / "base", CheckpointManifest(**about, files={}), HeldWeights(model.state_dict()))
    keys = {**MODEL, "layer_scale": True, "weights": tmp_path / "base"}
    run = asynchronous(corpus, model=keys, train={"steps": 1}, evaluate={"every_steps": 0})
    with serving(run, tmp_path / "async"):
        assert work(run, tmp_path / "async", "A")
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    records = train_in(World(), plain, eager("microbatch=4"), tmp_path / "plain")
    assert losses(Metrics(tmp_path / "async").read()) == losses(records)


def test_workers_that_take_turns_give_the_bits_of_plain_training(corpus, tmp_path, monkeypatch):
    run, both, next_task = asynchronous(corpus, sync={"max_staleness": 0}), threading.Barrier(2), Client.next_task
    asked: set[Client] = set()

    def together_at_first(client):  # on a busy machine one could make all updates before the other has come
        if client not in asked:
            asked.add(client)
            both.wait()
        return next_task(client)

    monkeypatch.setattr(Client, "next_task", together_at_first)
    with serving(run, tmp_path / "async"):
        together(*(partial(work, run, tmp_path / "async", site) for site in "AB"))
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    train_in(World(), plain, eager("microbatch=4"), tmp_path / "plain")
    expected, found = weights(tmp_path / "plain"), weights(tmp_path / "async")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {line["site"] for line in lines(tmp_path / "async")} == {"A", "B"}


def test_workers_together_train_on_each_sample_once(corpus, tmp_path):
    run = asynchronous(
        corpus, 2, train={"steps": 24}, sync={"wire": "int8", "max_staleness": 2}, checkpoint={"every_steps": 8}
    )
    with serving(run, tmp_path):
        together(*(partial(work, run, tmp_path, site) for site in "AB"))
    updates = lines(tmp_path)
    assert [line["update"] for line in updates] == list(range(24))
    assert sorted(line["item"] for line in updates) == list(range(24))
    assert all(0 <= line["staleness"] <= 2 for line in updates)
    records = Metrics(tmp_path).read()
    assert losses(records)[-1] < losses(records)[0] - 0.3
    scored = [record["step"] for record in records if "validation_loss" in record]
    assert all(due <= step for due, step in zip(range(3, 24, 4), scored, strict=True))
    assert scored[-1] == 23
    mine = {site: {r["step"] for r in Metrics(tmp_path / "sites" / site).read() if "loss" in r} for site in "AB"}
    assert mine["A"] | mine["B"] == set(range(24))
    assert not mine["A"] & mine["B"]
    assert {line["site"] for line in updates if line["update"] in mine["A"]} <= {"A"}
    reports = [Report.load(tmp_path / "sites" / site) for site in "AB"]
    assert sum(report.tokens for report in reports) == 24 * run.tokens_per_step
    for site in "AB":
        for record in Metrics(tmp_path / "sites" / site).read():
            if "loss" in record:
                assert 3.5 < record["sites"]["ratio"] < 4
                assert record["sync"]["staleness"] == record["sites"]["staleness_steps"]
    assert all(torch.isfinite(value).all() for value in weights(tmp_path).values())


LOCAL = {"local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0}


def test_one_worker_with_local_steps_and_plain_outer_steps_is_plain_training(corpus, tmp_path):
    run = asynchronous(corpus, 2, sync=LOCAL)
    with serving(run, tmp_path / "async"):
        assert work(run, tmp_path / "async", "A")
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    records = train_in(World(), plain, eager("microbatch=4"), tmp_path / "plain")
    for ours in (Metrics(tmp_path / "async").read(), Metrics(tmp_path / "async/sites/A").read()):
        assert losses(ours) == pytest.approx(losses(records), rel=1e-5)
        for key in ("step", "lr", "tokens"):
            assert [line[key] for line in ours if "lr" in line] == [line[key] for line in records if "lr" in line]
        assert [line["sites"]["steps"] for line in ours if "sites" in line] == [2] * 4
    expected, found = weights(tmp_path / "plain"), weights(tmp_path / "async")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert [line["samples"] for line in lines(tmp_path / "async")] == [[[16 * n, 16 * n + 16]] for n in range(4)]


def test_outer_steps_of_one_worker_are_those_of_pytorch(corpus, tmp_path):
    run = asynchronous(corpus, workers="A", sync={"local_steps": 2})
    with serving(run, tmp_path):
        assert work(run, tmp_path, "A")
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    world, plan = World(), eager("microbatch=4")
    state = TrainState.begin(apply(plan, plain, world), plan, plain)
    data = open_data(plain.data, plain.seed, plain.train.batches)
    batches = Batches(plain, plan, data, state, world, Events(tmp_path, "reference"))
    step = Step(plain, state, world, StepClock(world.device))
    outer = {piece.name: torch.nn.Parameter(piece.value.clone()) for piece in state.model.masters}
    theirs = torch.optim.SGD(outer.values(), lr=run.sync.outer_lr, momentum=run.sync.outer_momentum, nesterov=True)
    for number in range(8):
        outcome = step.exchange(step.forward_backward(batches.read(number)))
        step.apply(step.update(outcome, 1e-2 * learning_rate_factor(number, 8, plain.schedule)))
        if number % 2:
            for piece in state.model.masters:
                outer[piece.name].grad = outer[piece.name].detach() - piece.value
            theirs.step()
            for piece in state.model.masters:
                piece.value.copy_(outer[piece.name].detach())
            state.model.after_update()
    batches.close()
    found = weights(tmp_path)
    for name in found:
        torch.testing.assert_close(found[name], outer[name].detach(), rtol=1e-4, atol=1e-5)


def test_workers_with_local_steps_train_on_each_sample_once_and_go_on_from_a_checkpoint(corpus, tmp_path):
    sync = {"wire": "int8", "max_staleness": 2, "local_steps": 3}
    run = asynchronous(corpus, 2, train={"steps": 24}, sync=sync, checkpoint={"every_steps": 4})
    with serving(run, tmp_path):
        together(*(partial(work, run, tmp_path, site) for site in "AB"))
    assert sorted(line["item"] for line in lines(tmp_path)) == list(range(8))
    assert losses(Metrics(tmp_path).read())[-1] < losses(Metrics(tmp_path).read())[0] - 0.3
    longer = asynchronous(corpus, 3, train={"steps": 30}, sync=sync, schedule={"kind": "constant"})
    with serving(longer, tmp_path):
        work(longer, tmp_path, "B")
    records = [record for record in Metrics(tmp_path).read() if "loss" in record]
    assert [record["step"] for record in records] == list(range(30))
    assert [line["item"] for line in lines(tmp_path)][8:] == [8, 9]
    ranges = sorted(tuple(part) for record in records for part in record["sample_ranges"])
    assert ranges == [(8 * n, 8 * n + 8) for n in range(30)]
    rates = {(line["sites"]["staleness_steps"], line["sites"]["rate"]) for line in records if "sites" in line}
    assert all(rate == pytest.approx(0.7 / (staleness + 1)) for staleness, rate in rates)
    assert all(torch.isfinite(value).all() for value in weights(tmp_path).values())


def test_who_tells_of_another_number_of_steps_is_refused(corpus, tmp_path):
    run = asynchronous(corpus, train={"steps": 2}, sync=LOCAL)
    layout = ServerLayout(run.model_copy(update={"site": "B"}))
    with serving(run, tmp_path):
        stranger = Client(layout, secret_of(tmp_path), vectors(run))
        task = stranger.next_task().result(20.0)
        with pytest.raises(UserError, match="losses of 1 steps, and an update here is of 2"):
            stranger.deliver(task, vectors(run), [1.0], [1.0]).result(20.0)
        stranger.close()
        assert work(run, tmp_path, "A")


def test_the_servers_go_on_from_a_checkpoint_with_another_number_of_servers(corpus, tmp_path):
    run = asynchronous(corpus, 2, train={"steps": 6}, checkpoint={"every_steps": 3})
    with serving(run, tmp_path):
        work(run, tmp_path, "A")
    longer = asynchronous(corpus, 3, train={"steps": 10}, schedule={"kind": "constant"})
    with serving(longer, tmp_path):
        work(longer, tmp_path, "B")
    assert [line["update"] for line in lines(tmp_path)] == list(range(10))
    assert [line["site"] for line in lines(tmp_path)] == ["A"] * 6 + ["B"] * 4


def test_a_damaged_shard_is_left_out_and_the_step_is_repeated(sharded, tmp_path):
    run = asynchronous(sharded, data={"on_bad_shard": "skip"})
    with serving(run, tmp_path / "async"):
        assert work(run, tmp_path / "async", "A")
    plain = run.model_copy(update={"plan": "microbatch=4", "sites": ()})
    records = train_in(World(), plain, eager("microbatch=4"), tmp_path / "plain")
    assert losses(Metrics(tmp_path / "async").read()) == losses(records)
    assert "bad_shard" in events(tmp_path / "async/sites/A")


class ToHold(StopSignal):
    """Ranks are told to hold, the first one a moment before the others."""

    def __init__(self, is_to_hold: bool = False):
        super().__init__()
        self.is_to_hold, self.held = is_to_hold, 0

    def hold(self, seconds: float) -> None:
        self.is_to_hold, self.held = False, self.held + 1


def two_ranks(world: World, run: RunConfig, run_dir: Path, fault: str, stop: StopSignal | None = None) -> bool:
    """Be a rank of the worker A; the first one holds the servers, too."""
    plan, run = eager("dp_replicate=2,microbatch=2,sync=async"), run.model_copy(update={"plan": "sync=async"})
    faults.arm(fault, run_dir)
    os.environ["RANK"] = str(world.rank)  # some fault points have to ask for it
    try:
        with serving(run, run_dir) if world.is_first else nullcontext():
            own = run.model_copy(update={"site": "A"})
            return train(own, plan, world, run_dir / "sites/A", stop or StopSignal())
    finally:
        faults.arm("")
        del os.environ["RANK"]


def test_ranks_of_a_worker_that_differ_take_the_weights_anew(workers, corpus, tmp_path):
    run = asynchronous(corpus, sync=LOCAL, resilience={"fingerprint_every_steps": 1})
    assert workers.run(2, two_ranks, run, tmp_path / "two", "flip@weights:step=2,rank=1,bit=2") == [True, True]
    assert events(tmp_path / "two/sites/A").count("replicas_differ") == 1
    assert sorted(line["item"] for line in lines(tmp_path / "two")) == [0, 1, 2, 3]
    workers.run(2, two_ranks, run, tmp_path / "undisturbed", "")
    assert "replicas_differ" not in events(tmp_path / "undisturbed/sites/A")


def held(world: World, run: RunConfig, run_dir: Path) -> int:
    stop = ToHold(world.is_first)
    assert two_ranks(world, run, run_dir, "", stop)
    return stop.held


def test_all_ranks_of_a_worker_hold_before_one_task(workers, corpus, tmp_path):
    assert workers.run(2, held, asynchronous(corpus, train={"steps": 2}), tmp_path) == [1, 1]


def test_a_bad_gradient_changes_nothing_and_other_samples_stand_in(corpus, tmp_path):
    run = asynchronous(corpus, train={"steps": 6})
    with serving(run, tmp_path):
        faults.arm("nan@loss:step=2", tmp_path)
        try:
            work(run, tmp_path, "A")
        finally:
            faults.arm("")
    skipped = [line["skipped"] for line in lines(tmp_path) if "skipped" in line]
    updates = [line["item"] for line in lines(tmp_path) if "update" in line]
    assert skipped == [2]
    assert sorted(updates) == [0, 1, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda run: run.model_copy(update={"seed": 7}), "another run"),
        (
            lambda run: run.model_copy(update={"sites": (*run.sites, SiteConfig(name="C"))}),
            '"C", which is not expected',
        ),
        (lambda run: run.model_copy(update={"model": run.model.model_copy(update={"ffn_width": 32})}), "another model"),
    ],
)
def test_a_worker_of_another_run_is_refused_and_the_run_goes_on(corpus, tmp_path, change, why):
    run = asynchronous(corpus, train={"steps": 4})
    with serving(run, tmp_path):
        other = change(run)
        with pytest.raises(UserError, match=why):
            work(other, tmp_path, other.sites[-1].name)
        assert work(run, tmp_path, "A")
    events = [json.loads(line) for line in (tmp_path / "events/server-1.jsonl").read_text().splitlines()]
    assert any(event["event"] == "site_refused" and why in event["why"] for event in events)


def test_a_worker_that_starts_when_the_run_is_over_is_told(corpus, tmp_path):
    run = asynchronous(corpus, 1)
    reports = {name: tmp_path / "sites" / name / "report.json" for name in "AB"}
    with serving(run, tmp_path, late_s=60.0):
        assert work(run, tmp_path, "A")
        reports["A"].unlink()
        assert work(run, tmp_path, "A")  # again: its process was killed after its last update
        assert work(run, tmp_path, "B")
    assert Report.load(reports["A"].parent).steps == 8
    assert not reports["B"].exists(), "it has made no update"


def test_a_worker_that_starts_when_the_servers_have_gone_ends_if_it_sees_the_last_checkpoint(corpus, tmp_path):
    run = asynchronous(corpus, 1, "A", sync={"patience_s": 0.2})
    with serving(run, tmp_path):
        assert work(run, tmp_path, "A")
    report = tmp_path / "sites/A/report.json"
    report.unlink()
    assert work(run, tmp_path, "A") and Report.load(report.parent).steps == 8


def test_who_does_not_know_the_secret_is_not_heard(corpus, tmp_path, monkeypatch):
    run = asynchronous(corpus, train={"steps": 4})
    with serving(run, tmp_path):
        stranger = Client(ServerLayout(run.model_copy(update={"site": "B"})), b"another secret" * 4, vectors(run))
        future = stranger.next_task()
        assert work(run, tmp_path, "A")
        assert not future.done()
        stranger.close()
        with pytest.raises(WorkerStopped):
            future.result(5.0)
    assert {line["site"] for line in lines(tmp_path)} == {"A"}


def test_a_server_that_dies_goes_on_from_its_checkpoint_and_so_do_workers(corpus, tmp_path):
    run = asynchronous(corpus, train={"steps": 12}, checkpoint={"every_steps": 3})
    worker = threading.Thread(target=work, args=(run, tmp_path, "A"))
    save_run(run, tmp_path / "run.toml")
    server = ParameterServer(run, tmp_path, 0)
    worker.start()
    while len(lines(tmp_path)) < 8:
        server.turn()
    server.close()  # at once, as if it was killed: nothing is saved
    forgotten = len(lines(tmp_path))
    with serving(run, tmp_path):
        worker.join(60.0)
    assert not worker.is_alive()
    events = [json.loads(line) for line in (tmp_path / "events/server-1.jsonl").read_text().splitlines()]
    begun = [(event["step"], event["lost"]) for event in events if event["event"] == "servers_begin"]
    assert begun[0] == (0, 0)
    assert begun[1][0] in (3, 6)
    assert sum(begun[1]) == forgotten
    updates = lines(tmp_path)
    assert [line["update"] for line in updates] == list(range(12))
    assert sorted(line["item"] for line in updates) == list(range(12))
    steps = [record["step"] for record in Metrics(tmp_path / "sites/A").read() if "loss" in record]
    assert steps == list(range(12))


def test_a_worker_that_is_started_again_forgets_what_the_servers_have_lost(corpus, tmp_path):
    run, worker = asynchronous(corpus, workers="A"), tmp_path / "sites/A"
    worker.mkdir(parents=True)
    (worker / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 9.0}}\n' for step in range(3)))
    with serving(run, tmp_path):
        assert work(run, tmp_path, "A")
    assert [record["step"] for record in Metrics(worker).read() if "loss" in record] == list(range(8))


def test_a_worker_that_others_wait_for_too_long_loses_its_samples(corpus, tmp_path):
    run = asynchronous(corpus, train={"steps": 5}, sync={"max_staleness": 0, "patience_s": 0.5})
    layout = ServerLayout(run.model_copy(update={"site": "B"}))
    with serving(run, tmp_path):
        slow = Client(layout, secret_of(tmp_path), vectors(run))
        task = slow.next_task().result(20.0)
        assert task.item == 0
        assert work(run, tmp_path, "A")
        late = slow.deliver(task, vectors(run), [1.0], [1.0]).result(20.0)
        assert late.update is None
        slow.close()
    assert {line["site"] for line in lines(tmp_path)} == {"A"}
    assert sorted(line["item"] for line in lines(tmp_path)) == list(range(5))


def test_what_is_no_gradient_is_refused(corpus, tmp_path):
    run = asynchronous(corpus, train={"steps": 3})
    layout = ServerLayout(run.model_copy(update={"site": "B"}))
    with serving(run, tmp_path):
        stranger = Client(layout, secret_of(tmp_path), vectors(run))
        task = stranger.next_task().result(20.0)
        nothing = [np.full_like(part, np.nan) for part in vectors(run)]
        assert stranger.deliver(task, nothing, [1.0], [1.0]).result(20.0).update is None
        short = [part[:-300] for part in vectors(run)]
        with pytest.raises(UserError, match="no piece of a gradient"):
            stranger.deliver(task, short, [1.0], [1.0]).result(20.0)
        stranger.close()
        assert lines(tmp_path) == []
        assert work(run, tmp_path, "A")


def vectors(run: RunConfig):
    return [np.zeros(flat.elements, np.float32) for flat in ServerLayout(run).flats]
