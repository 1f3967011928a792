"""What strikes follows from the seed; it is injected, measured and compared rightly.

The ledger of samples tells which were trained on and skipped, and which are missing or there twice.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from argosy.chaos import run as chaos
from argosy.chaos.campaign import (
    KINDS,
    SCRATCH,
    Campaign,
    FirstStep,
    InjectedFault,
    PlannedFault,
    descendants,
    is_alive,
)
from argosy.chaos.run import ChaosReport, FaultOutcome, draw, fault_points_of, read_ledger, weight_differences
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.shards import part_box, wholes, write_shard
from argosy.data.order import kept, skipped_by
from argosy.errors import UserError
from argosy.faults import parse
from chaos import fake_run

STEPS = 60


def test_the_same_seed_draws_the_same():
    assert draw(7, 600, 20) == draw(7, 600, 20)
    assert draw(7, 600, 20) != draw(8, 600, 20)


def test_faults_come_as_often_as_asked_and_of_all_kinds():
    faults = draw(1, 200_000, 20)
    gaps = [b.at_s - a.at_s for a, b in pairwise(faults)]
    assert mean(gaps) == pytest.approx(20, rel=0.05)
    assert sum(gap < 2 for gap in gaps) > 0.05 * len(gaps)  # some meet a run that has not got over the last
    total = sum(kind.weight for kind in KINDS.values())
    for name, kind in KINDS.items():
        assert sum(fault.kind == name for fault in faults) == pytest.approx(len(faults) * kind.weight / total, rel=0.15)


def test_kinds_can_be_chosen_and_must_exist():
    assert {fault.kind for fault in draw(1, 1000, 10, ["kill", "term"])} == {"kill", "term"}
    with pytest.raises(UserError, match="--kinds kil: there are kill"):
        draw(1, 1000, 10, ["kil"])


def test_fault_points_are_such_as_a_run_understands():
    faults = parse(fault_points_of(draw(3, 5000, 10, ["point"]), steps=100, ranks=4))
    assert len(faults) > 300
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}
    assert all(1 <= (fault.step or fault.after or 0) < 99 for fault in faults)
    assert {fault.point for fault in faults} == {*chaos.STEP_POINTS, *chaos.SAVE_POINTS}


@pytest.fixture(autouse=True)
def swept() -> Iterator[None]:
    """A launcher that was killed leaves its folder; a real one's is swept away by the next."""
    before = set(SCRATCH.glob("argosy-[0-9]*"))
    yield
    for folder in set(SCRATCH.glob("argosy-[0-9]*")) - before:
        if not is_alive(int(folder.name.split("-")[1])):
            shutil.rmtree(folder)


def campaign(tmp_path: Path, *faults: PlannedFault) -> Campaign:
    run_dir = tmp_path / "run"
    command = [sys.executable, fake_run.__file__, str(run_dir), str(STEPS)]
    return Campaign(command, run_dir, faults, {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_faults_are_injected_and_the_run_is_watched_until_its_end(tmp_path):
    run = campaign(tmp_path, PlannedFault(0.3, "kill", 0.0), PlannedFault(1.0, "coordinator", 0.0))
    run.run()
    assert run.exit_code == 0 and run.starts == 1
    (injected,) = run.injected  # a run without a coordinator cannot lose it
    assert injected.fault.kind == "kill" and injected.pid in run.workers_seen
    assert 0 <= injected.step < STEPS
    outcome = chaos.outcome_of(injected, chaos.events_of(run.run_dir), run, run.began_s)
    assert outcome.seen_s is not None and outcome.again_s is not None
    assert 0 < outcome.seen_s < outcome.again_s
    assert outcome.steps_lost == 0
    assert (tmp_path / "run" / "made").read_text() == str(STEPS)
    assert not list(chaos.left_behind(run.pids | run.workers_seen))


@pytest.mark.parametrize("kind", [pytest.param("term", marks=pytest.mark.slow), "launcher"])
def test_a_run_whose_command_was_killed_is_started_again(tmp_path, kind):
    run = campaign(tmp_path, PlannedFault(0.3, kind, 0.5))
    run.run()
    assert run.exit_code == 0 and run.starts == 2
    # On a busy machine the first is killed before it has made a step.
    assert run.made[-1].generation == 2 and run.made[-1].step >= run.injected[0].step


def test_a_run_that_fails_by_itself_is_not(tmp_path):
    run = Campaign([sys.executable, "-c", "raise SystemExit(2)"], tmp_path / "run", ())
    run.run()
    assert run.exit_code == 2 and run.starts == 1


def test_a_run_that_does_not_end_is_ended(tmp_path):
    run = Campaign([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "run", (), limit_s=0.5)
    run.run()
    assert run.exit_code == -9 and not list(chaos.left_behind(run.pids))


def test_steps_that_are_made_again_count_as_lost():
    run = Campaign((), Path(), (), made=[FirstStep(1, 0, 0.0), FirstStep(2, 7, 14.0)], workers_seen={5})
    injected = InjectedFault(PlannedFault(1, "kill", 0), "", 5, 10.0, 1, 9)
    outcome = chaos.outcome_of(injected, [{"event": "worker_died", "time_s": 10.4, "pid": 5}], run, 0.0)
    assert (outcome.seen_s, outcome.again_s, outcome.steps_lost) == (0.4, 4.0, 2)
    other = chaos.outcome_of(injected, [{"event": "worker_died", "time_s": 10.4, "pid": 6}], run, 0.0)
    assert other.seen_s is None


def test_descendants_of_a_process_are_found():
    assert os.getpid() in descendants(os.getppid())
    assert descendants(2**22 + 1) == []


def report(**values: object) -> ChaosReport:
    outcome = FaultOutcome(
        kind="kill", what="SIGKILL", at_s=3.0, pid=5, step=9, seen_s=0.1, again_s=2.5, steps_lost=0
    )  # fmt: skip
    well: dict[str, object] = {
        "seed": 7, "finished": True, "steps": 100, "reference_s": 60.0, "chaos_s": 80.0, "goodput": 0.75,
        "generations": 2, "starts": 1, "same_losses": True, "same_weights": True, "differences": (),
        "ledger": (), "left_behind": (), "faults": (outcome,), "missed": 0,
    }  # fmt: skip
    return ChaosReport.model_validate(well | values)


def test_a_report_says_whether_it_is_well():
    assert report().is_passed and "passed" in report().in_words() and "75%" in report().in_words()
    for wrong in ({"finished": False}, {"same_weights": False}, {"ledger": ("samples 0 to 3 are missing",)}):
        assert not report(**wrong).is_passed and "FAILED" in report(**wrong).in_words()
    undisturbed = report(faults=()).in_words()
    assert "passed" not in undisturbed and "shows nothing: try a smaller --every-s" in undisturbed
    assert ChaosReport.model_validate_json(report().model_dump_json()) == report()


Ranges = list[tuple[int, int]]


def lines(steps: int, batch: int, skipped: Ranges) -> list[dict[str, Any]]:
    """As the loop writes them."""
    records = []
    for step in range(steps):
        first, stop = step * batch, (step + 1) * batch
        record: dict[str, Any] = {"step": step, "samples": batch, "first_sample": kept(first, stop, skipped)[0][0]}
        if holes := skipped_by(first, stop, skipped):
            record["samples_skipped"] = [list(hole) for hole in holes]
        records += [record, {"step": step, "validation_loss": 1.0}]
    return records


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Ranges that do not overlap."""
    ends = sorted(draw(st.lists(st.integers(0, 60), unique=True, max_size=8)))
    return [(first, stop) for first, stop in zip(ends[::2], ends[1::2], strict=False)]


@given(ranges(), st.integers(1, 7), st.integers(1, 9))
def test_what_the_loop_writes_is_each_sample_once(skipped: Ranges, batch: int, steps: int):
    ledger = read_ledger(lines(steps, batch, skipped))
    assert ledger.problems == ()
    assert ledger.committed == steps * batch
    end = kept(0, steps * batch, skipped)[-1][1]
    assert list(ledger.skipped) == [hole for hole in skipped if hole[0] < end]


def test_a_step_that_is_missing_or_there_twice_is_found():
    records = lines(5, 4, [(8, 12)])
    assert read_ledger([r for r in records if r["step"] != 1]).problems == ("samples 4 to 7 are missing",)
    assert read_ledger([*records, records[2]]).problems == ("samples 4 to 7 appear twice",)


def test_samples_that_were_left_out_without_a_word_are_found():
    records = lines(3, 4, [(4, 8)])
    for record in records:
        record.pop("samples_skipped", None)
    assert read_ledger(records).problems == ("samples 4 to 7 are missing",)


def checkpoint(run_dir: Path, step: int, **tensors: torch.Tensor) -> Path:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    save_file(tensors, folder / "rank-00000.safetensors")
    (folder / "manifest.json").write_text("{}")
    return run_dir


def test_weights_are_compared_bit_for_bit(tmp_path):
    a = torch.randn(3, 4)
    b = a.clone()
    b.view(torch.int32)[1, 2] ^= 1
    same = checkpoint(tmp_path / "a", 5, x=a, y=torch.zeros(2))
    again = checkpoint(tmp_path / "b", 5, x=a, y=torch.zeros(2))
    other = checkpoint(tmp_path / "c", 5, x=b, z=torch.zeros(2))
    assert list(weight_differences(same, again)) == []
    assert list(weight_differences(same, other)) == ["x", "y", "z"]
    assert list(weight_differences(same, tmp_path / "none")) == ["a checkpoint is missing"]
    assert list(weight_differences(same, checkpoint(tmp_path / "d", 6, x=a))) == [
        "the last checkpoints are of steps 5 and 6"
    ]


def sharded(run_dir: Path, *shards: Mapping[Box, torch.Tensor]) -> Path:
    """A checkpoint in files as ranks write them."""
    folder = run_dir / "checkpoints" / "step-00000005"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    for rank, parts in enumerate(shards):
        with (folder / f"rank-{rank:05d}.safetensors").open("w+b") as file:
            write_shard(file.fileno(), parts, {})
    return run_dir


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_tensor_that_is_cut_is_the_same_as_one_that_is_not(tmp_path, dtype):
    tensor, scalar = torch.arange(24).view(4, 6).to(dtype), torch.tensor(3.0)
    whole = sharded(tmp_path / "whole", wholes({"x": tensor, "s": scalar}))
    cuts = [{part_box("x", tensor[:, a:b], (4, 6), (0, a)): tensor[:, a:b]} for a, b in ((0, 2), (2, 6))]
    cut = sharded(tmp_path / "cut", {**cuts[0], **wholes({"s": scalar})}, cuts[1])
    assert list(weight_differences(whole, cut)) == []
    changed = tensor.clone()
    changed.view(torch.uint8)[3, 5] ^= 1
    assert list(weight_differences(cut, sharded(tmp_path / "other", wholes({"x": changed, "s": scalar})))) == ["x"]
