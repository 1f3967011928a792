"""`argosy parity`, as a user runs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commands import Folder


@pytest.mark.slow
def test_a_plan_of_two_processes_gives_the_numbers_of_one(folder: Folder) -> None:
    folder.write_run()
    (found,) = folder.documents("parity", "run.toml", "--plan", "tp=2", "--steps", 3, here=False)
    assert found["holds"] and found["steps"] == 3 and found["plan"].startswith("tp=2")
    loss, weights = (found["differences"][key] for key in ("loss", "weights"))
    assert loss["relative"] < found["tolerance"] == 1e-5
    assert weights["where"].endswith((".weight", ".bias"))
    assert not (folder.path / "runs").exists()  # it leaves none of its runs behind


@pytest.mark.slow
def test_coarser_arithmetic_is_beyond_a_tolerance_that_is_asked_for(folder: Folder) -> None:
    folder.write_run()
    plan = "dp_replicate=2,precision=bf16"
    text = folder.argosy("parity", "run.toml", "--plan", plan, "--steps", 2, "--tolerance", 1e-5, code=1)
    assert "beyond its limit" in text and "differs from one process" in text


def test_a_plan_that_the_run_cannot_use_is_refused(folder: Folder, refused: Callable[..., str]) -> None:
    folder.write_run()
    refused("parity", "run.toml", "--plan", "tp=8", said=("plan.tp = 8", "model.heads = 4", "would do"))
    refused("parity", "run.toml", "--plan", "tp=2", "--tolerance", -1, said=("--tolerance -1", "1e-5"))
