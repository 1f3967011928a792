"""A run whose processes are killed around it comes to the same weights as one that is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from commands import Folder


def chaos(folder: Folder, *options: object, steps: int) -> dict[str, Any]:
    """The report of a disturbed run, which has passed, or the exit code would be 1."""
    folder.write_run(steps=steps, every_steps=10)
    limits = ("--resilience.beat-timeout-s", 2, "--launch.max-restarts", 20)
    report: dict[str, Any] = folder.documents("chaos", "run.toml", *options, *limits, here=False)[0]
    return report


def check(report: dict[str, Any], steps: int) -> None:
    assert report["finished"] and report["same_weights"] and report["same_losses"], report
    assert not report["ledger"] and not report["left_behind"], report
    assert report["steps"] == steps and report["faults"], report


@pytest.mark.slow
def test_kills_change_no_weight(folder: Folder) -> None:
    report = chaos(folder, "--fault-seed", 3, "--every-s", 3, "--kinds", "kill", steps=80)
    check(report, 80)
    for fault in report["faults"]:
        assert fault["seen_s"] is not None and fault["seen_s"] < 2, fault


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_fault_changes_a_weight(folder: Folder, seed: int) -> None:
    report = chaos(folder, "--fault-seed", seed, "--every-s", 4, steps=1000)
    check(report, 1000)


def test_wrong_options_are_refused_and_nothing_is_replaced(refused, folder: Folder) -> None:
    folder.write_run()
    written = (folder.path / "run.toml").read_text()
    said = folder.argosy_here("chaos", "run.toml", "--kinds", "kil", code=2)
    assert "--kinds kil" in said and "there are kill" in said and "Traceback" not in said
    refused("chaos", "run.toml", "--folder", ".", said=("run.toml would be replaced", "another --folder"))
    assert (folder.path / "run.toml").read_text() == written
    refused("chaos", "run.toml", "--every-s", "0", said=("--every-s 0",))
    refused("chaos", "run.toml", "--launch.nodes", "2", said=("launch.nodes = 2", "--launch.nodes 1"))
