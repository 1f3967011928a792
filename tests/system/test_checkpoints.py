"""Checkpoints of real runs: whatever dies or is lost, what is committed is whole, and the losses are the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

import run_folder
from argosy.chaos.campaign import children, command_of
from argosy.checkpoint import store
from commands import Folder
from waiting import PATIENT_S, wait_until

events = partial(run_folder.events, process="*")


def losses(run_dir: Path) -> list[float]:
    path = run_dir / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [record["loss"] for record in records if "loss" in record]


def writers(run_dir: Path) -> list[int]:
    """Return the writer processes of a run's workers."""
    workers = [event["pid"] for event in events(run_dir, "worker_started")]
    return [pid for worker in workers for pid in children(worker) if "argosy.checkpoint.writer" in command_of(pid)]


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run that nothing stopped."""
    folder = Folder(tmp_path_factory.mktemp("undisturbed"), corpus)
    folder.write_run(steps=20)
    folder.argosy("train", "run.toml")
    return losses(folder.path / "runs/tiny")


@pytest.mark.slow
def test_killed_writers_are_replaced_and_nothing_else_happens(folder: Folder, undisturbed: list[float]) -> None:
    folder.write_run(steps=20)
    run_dir = folder.path / "runs/tiny"
    process = folder.start("train", "run.toml")
    wait_until(lambda: len(writers(run_dir)) == 2)
    killed = writers(run_dir)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0, err
    assert {event["pid"] for event in events(run_dir, "writer_died")} == set(killed)
    assert losses(run_dir) == undisturbed
    assert store.newest_whole(run_dir).checkpoint.step == 20
    assert all(checkpoint.is_verified for checkpoint in store.committed(run_dir))
    assert writers(run_dir) == []


@pytest.mark.slow
def test_a_run_whose_disk_is_lost_goes_on_from_its_copies(folder: Folder, undisturbed: list[float]) -> None:
    folder.write_run(steps=20)
    run_dir, remote = folder.path / "runs/tiny", ("--checkpoint.remote", "elsewhere")
    folder.argosy("train", "run.toml", "--train.pause_at", 8, *remote)
    assert (folder.path / "elsewhere/tiny/step-00000008/manifest.json").exists()
    shutil.rmtree(run_dir / "checkpoints")
    folder.argosy("train", "run.toml", *remote)
    assert events(run_dir, "fetched")[0]["step"] == 8
    assert losses(run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("victim", ["first writer", "other writer", "everything"])
def test_what_dies_in_the_middle_of_a_write_leaves_the_checkpoint_before(
    folder: Folder, undisturbed: list[float], victim: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_run(steps=20)
    run_dir = folder.path / "runs/tiny"
    rank = 1 if victim == "other writer" else 0
    action = "stop" if victim == "everything" else "kill"
    monkeypatch.setenv("ARGOSY_FAULTS", f"{action}@save:step=10,rank={rank},fraction={fraction}")
    process = folder.start("train", "run.toml")
    if victim == "everything":
        wait_until(lambda: len(losses(run_dir)) >= 10)
        wait_until(lambda: list((run_dir / "checkpoints").glob("step-00000010*.partial")))
        pids = [*writers(run_dir), *(event["pid"] for event in events(run_dir, "worker_started"))]
        process.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        assert store.newest_whole(run_dir).checkpoint.step == 8 and not store.newest_whole(run_dir).damaged
        monkeypatch.delenv("ARGOSY_FAULTS")
        process = folder.start("train", "run.toml")
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0, err
    assert losses(run_dir) == undisturbed
    assert store.newest_whole(run_dir).checkpoint.step == 20
    assert subprocess.run(["find", run_dir, "-name", "*.partial"], capture_output=True, check=True).stdout == b""
