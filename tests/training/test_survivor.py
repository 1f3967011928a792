"""A run goes on in another world of processes as if nothing had happened, whichever processes are in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy import faults
from argosy.accelerator import peak_memory_bytes
from argosy.chaos.run import read_ledger
from argosy.checkpoint import store
from argosy.checkpoint.memory import MEMORY_VARIABLE, NODE_VARIABLE
from argosy.config.schema import RunConfig
from argosy.observe.events import Metrics, read_lines
from argosy.observe.report import Report
from argosy.parallel.world import World
from argosy.training.loop import train
from argosy.training.state import Survivor
from argosy.training.stop import StopSignal, WorldIsOver
from tiny import OverAfter, eager, run_config, train_in, weights
from workers import next_world


def interrupted(
    world: World, run: RunConfig, plan: str, folder: Path, lost: int, last_line_missing: bool
) -> list[dict[str, Any]]:
    """A run whose world is over after 5 steps; in the next, rank `lost` is a process that knows nothing."""
    memory = folder / f"memory-{world.rank}"
    memory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NODE_VARIABLE, f"node-{world.rank}")
        patch.setenv(MEMORY_VARIABLE, str(memory))
        survivor = Survivor()
        with suppress(WorldIsOver):
            train(run, eager(plan), world, folder / "run", OverAfter(5), survivor)
        world = next_world(world, folder / "store")
        if last_line_missing and world.is_first:
            lines = (folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
            (folder / "run" / "metrics.jsonl").write_text("".join(lines[:-1]))
        train(run, eager(plan), world, folder / "run", StopSignal(), Survivor() if world.rank == lost else survivor)
    return Metrics(folder / "run").read()


@pytest.mark.parametrize(
    ("plan", "lost", "tier", "from_step"),
    [
        ("dp_replicate=2", 0, "live", 5),
        ("dp_shard=2,zero=1", 1, "memory", 4),
        pytest.param("dp_replicate=2,sync=int8", 0, "memory", 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_for_bit_in_a_world_in_which_a_process_is_new(
    workers, corpus, tmp_path, plan, lost, tier, from_step
):
    run = run_config(
        corpus, evaluate={"every_steps": 0, "tokens": 600}, resilience={"memory_checkpoint_every_steps": 2}
    )
    records = workers.run(2, interrupted, run, plan, tmp_path, lost, tier == "live")[0]
    expected = workers.run(2, train_in, run, eager(plan), tmp_path / "undisturbed")[0]
    for key in ("step", "tokens", "loss", "grad_norm", "lr", "validation_loss"):
        assert column(records, key) == column(expected, key), key
    found, wanted = weights(tmp_path / "run"), weights(tmp_path / "undisturbed")
    assert all((found[name] == wanted[name]).all() for name in found.keys() | wanted.keys())
    events = [e for e in read_lines(tmp_path / "run" / "events" / "rank-0.jsonl") if e["event"] == "recovered"]
    assert [(e["source"], e["step"], e["steps_lost"]) for e in events] == [(tier, from_step, 5 - from_step)]
    assert [c.step for c in store.committed(tmp_path / "run")] == [8]


def test_steps_that_no_survivor_knows_of_are_counted_from_their_lines(corpus, tmp_path):
    run = run_config(corpus, checkpoint={"every_steps": 100}, evaluate={"every_steps": 0})
    paused = run_config(corpus, checkpoint={"every_steps": 100}, evaluate={"every_steps": 0}, train={"pause_at": 4})
    train(paused, eager(""), World(), tmp_path, StopSignal(), Survivor())
    with pytest.raises(WorldIsOver):
        train(run, eager(""), World(), tmp_path, OverAfter(2), Survivor())
    train(run, eager(""), World(), tmp_path, StopSignal(), Survivor())
    events = [e for e in read_lines(tmp_path / "events" / "rank-0.jsonl") if e["event"] == "recovered"]
    assert [(e["source"], e["step"], e["steps_lost"]) for e in events] == [("disk", 4, 0), ("disk", 4, 2)]
    assert column(Metrics(tmp_path).read(), "step")[:8] == list(range(8))


def broken_off(world: World, run: RunConfig, folder: Path, fault: str, unsaved_s: float) -> list[dict[str, Any]]:
    """A run whose world ends when `fault` strikes all ranks; the next goes on with new rank 0 and a survivor."""
    survivor = Survivor()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="injected"):
        patch.setenv("RANK", str(world.rank))  # some fault points have to ask for it
        faults.arm(fault, folder)
        train(run, eager("dp_replicate=2"), world, folder, StopSignal(), survivor)
    faults.arm("")
    world = next_world(world, folder / "store")
    assert survivor.last_save_s is not None
    survivor.last_save_s -= unsaved_s
    train(run, eager("dp_replicate=2"), world, folder, StopSignal(), Survivor() if world.is_first else survivor)
    return Metrics(folder).read()


@pytest.fixture(scope="module")
def undisturbed(workers, tmp_path_factory) -> Callable[[RunConfig, str], list[dict[str, Any]]]:
    """Run and plan -> the records of that run if nothing disturbs it, trained when they are first asked for."""
    known: dict[str, list[dict[str, Any]]] = {}

    def records(run: RunConfig, plan: str) -> list[dict[str, Any]]:
        key = f"{plan} {run.model_dump_json()}"
        if key not in known:
            layout, folder = eager(plan), tmp_path_factory.mktemp("undisturbed")
            known[key] = workers.run(layout.world_size, train_in, run, layout, folder)[0]
        return known[key]

    return records


@pytest.mark.parametrize("fault", ["raise@evaluate:step=4", "raise@snapshot:step=4"])
def test_an_evaluation_or_a_save_that_was_interrupted_is_run_again(workers, corpus, tmp_path, undisturbed, fault):
    run = run_config(corpus, checkpoint={"every_steps": 4, "background": False})
    records = workers.run(2, broken_off, run, tmp_path / "run", fault, 0.0)[0]
    expected = undisturbed(run, "dp_replicate=2")
    for key in ("step", "loss", "grad_norm", "validation_loss", "first_sample"):
        assert sorted(column(records, key)) == sorted(column(expected, key)), key
    assert read_ledger(records).problems == ()
    assert [c.step for c in store.committed(tmp_path / "run")] == [4, 8]


def broken_in_update(world: World, run: RunConfig, plan: str, folder: Path, amid: str) -> list[dict[str, Any]]:
    """Rank 0 is lost in the sixth step's update; what the others had done of it by then is up to their rank and `amid`:
    all are in what an update takes of others, or rank 1 has applied it and the others know only that they may.
    """
    survivor, barrier = Survivor(), World.barrier

    def over(self: World) -> None:
        barrier(self)
        if survivor.state is not None and survivor.state.step == 5:
            raise WorldIsOver

    with pytest.MonkeyPatch.context() as patch, suppress(WorldIsOver, RuntimeError):
        if amid == "prepare":
            patch.setenv("RANK", str(world.rank))
            faults.arm("raise@prepared:step=5", folder)
        elif world.rank != 1:
            patch.setattr(World, "barrier", over)
        train(run, eager(plan), world, folder, OverAfter(6), survivor)
    faults.arm("")
    world = next_world(world, folder / "store")
    train(run, eager(plan), world, folder, StopSignal(), Survivor() if world.is_first else survivor)
    return Metrics(folder).read()


@pytest.mark.parametrize(("amid", "step"), [("prepare", 5), ("apply", 6)])
def test_a_death_in_an_update_that_takes_other_ranks_loses_no_step(workers, corpus, tmp_path, undisturbed, amid, step):
    run = run_config(corpus, optimizer={"kind": "muon"}, train={"global_batch": 6}, evaluate={"every_steps": 0})
    records = workers.run(3, broken_in_update, run, "dp_replicate=3", tmp_path / "run", amid)[0]
    expected = undisturbed(run, "dp_replicate=3")
    for key in ("step", "tokens", "loss", "grad_norm"):
        assert column(records, key) == column(expected, key), key
    (event,) = [e for e in read_lines(tmp_path / "run" / "events" / "rank-0.jsonl") if e["event"] == "recovered"]
    assert (event["source"], event["step"], event["steps_lost"]) == ("live", step, 0)


def test_minutes_without_a_save_are_counted_on_in_the_next_world(workers, corpus, tmp_path):
    run = run_config(corpus, checkpoint={"every_minutes": 1})
    workers.run(2, broken_off, run, tmp_path, "raise@batch:step=5", 120.0)
    assert [c.step for c in store.committed(tmp_path)] == [6, 8]


def test_the_report_counts_memory_from_before_the_first_world(workers, corpus, tmp_path):
    run = run_config(corpus)
    bases = workers.run(2, memory_before, run, tmp_path)
    assert Report.load(tmp_path / "run").memory_before_bytes == bases[0]


def memory_before(world: World, run: RunConfig, folder: Path) -> int:
    """What the survivor took down in its first world, where it held half a gigabyte less than in its second."""
    survivor = Survivor()
    with suppress(WorldIsOver):
        train(run, eager("dp_replicate=2"), world, folder / "run", OverAfter(3), survivor)
    before = survivor.memory_before_bytes
    assert before is not None
    large = torch.ones(2**27)
    peak = peak_memory_bytes(world.device)
    del large
    world = next_world(world, folder / "store")
    train(run, eager("dp_replicate=2"), world, folder / "run", StopSignal(), survivor)
    assert peak_memory_bytes(world.device) < peak, "the peak is that of the last world"
    return before


def column(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records if key in record]
