"""A run that is launched on this machine."""

from __future__ import annotations

import pytest

from commands import Folder
from matrix import PLANS, Disturbed
from pages import try_all


@pytest.fixture
def run(folder: Folder) -> Disturbed:
    run = Disturbed(folder, PLANS["replicas"])
    run.write()
    return run


@pytest.mark.slow
def test_the_commands_of_the_page_work(run: Disturbed) -> None:
    try_all("local.md", run.folder, {}, ("--train.steps", "6"))
    (found,) = run.folder.documents("runs", here=False)
    assert found["state"] == "finished" and found["step"] == 6


def test_what_only_clusters_have_is_refused_and_a_run_that_was_not_launched_is_named(
    run: Disturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run.folder.argosy_here("launch", "run.toml", "--partition", "fast", "--nodes", "2", code=2)
    assert "--on local: --nodes, --partition has no meaning there" in refused
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no kubectl here" in _without_programs(run, "kubernetes", "--image", "a", "--volume", "b")
    assert "there is no sbatch here" in _without_programs(run, "slurm")
    assert "there is no ssh here" in _without_programs(run, "ssh", "--hosts", "a,b")
    (run.run_dir / "events").mkdir(parents=True)
    (run.run_dir / "run.toml").touch()
    assert "the run was not launched" in run.folder.argosy_here("stop", "runs/tiny", code=2)


def _without_programs(run: Disturbed, engine: str, *options: str) -> str:
    said = run.folder.argosy_here("launch", "run.toml", "--on", engine, *options, code=2)
    assert not run.run_dir.exists()
    return said
