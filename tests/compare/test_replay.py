"""Steps done again give the same bits, one that differs is named, and the folder of the run is left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from argosy.checkpoint import store
from argosy.cli import main
from argosy.compare.replay import replay
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch import run_folder
from argosy.observe.events import Events
from argosy.parallel.world import World
from tiny import EAGER, eager, run_config, train_in


@pytest.fixture(scope="module")
def run_dir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints after 3 and 6, as the launcher leaves it."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    run_dir.mkdir()
    launch = {"threads": 1, "device": "cpu"}  # as here
    run = run_config(corpus, checkpoint={"every_steps": 3, "keep_last": 9}, launch=launch)
    run_folder.write(run_dir, run, EAGER, [corpus])
    train_in(World(), run, EAGER, run_dir)
    return run_dir


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def edited(run_dir: Path, step: int, **values: Any) -> None:
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["step"] == step and "loss" in record:
            record.update(values)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_steps_done_again_from_a_checkpoint_are_the_same_bits(run_dir: Path) -> None:
    before, beside = contents(run_dir), set(run_dir.parent.iterdir())
    found = replay(run_dir, 4)
    assert found.start == 3 and [step.step for step in found.steps] == [3, 4]
    assert found.is_equal, found
    assert contents(run_dir) == before and set(run_dir.parent.iterdir()) == beside


@pytest.mark.slow
def test_without_a_checkpoint_before_it_a_step_is_done_from_the_initial_weights(run_dir: Path) -> None:
    found = replay(run_dir, 1)
    assert found.start == 0 and found.is_equal


@pytest.mark.slow
def test_a_step_that_differs_is_named(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    edited(copy, 7, loss=5.0)
    assert main(["replay", str(copy), "--step", "7", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["start"] == 6 and not found["equal"]
    assert [step["step"] for step in found["steps"] if step["before"] != step["now"]] == [7]


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    shard = next(store.step_folder(copy, 6).glob("rank-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    monkeypatch.setattr("argosy.compare.replay.train_quietly", lambda run, folder, command: None)
    assert replay(copy, 7).start == 3


def test_a_run_of_several_nodes_is_done_again_without_the_others(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    gone = {"cluster": "gone.toml", "lease": "etcd://gone:2379", "address": "10.0.0.1", "rank_map": "gone.txt"}
    launch = {"nodes": 2, "node": "a", **gone}
    run = load(copy / "run.toml").with_keys(launch=launch, resilience={"rebalance": True})
    save_run(run, copy / "run.toml")
    tried: list[RunConfig] = []
    monkeypatch.setattr("argosy.compare.replay.train_quietly", lambda run, folder, command: tried.append(run))
    replay(copy, 7)
    assert tried[0].launch.nodes == 1 and not tried[0].resilience.rebalance
    assert {getattr(tried[0].launch, key) for key in ("node", *gone)} == {""}


def test_a_step_that_is_not_there_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no such step; counted from 0, it has 0 to 7 \(training shows the last as step 8\)"
    ):
        replay(run_dir, 8)
    with pytest.raises(UserError, match=r"run\.toml is missing"):
        replay(tmp_path, 0)


@pytest.mark.parametrize("event", ["start", "rebalanced"])
def test_steps_of_several_plans_are_refused(run_dir: Path, tmp_path: Path, event: str) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    Events(copy, "rank-0").write(event, step=4, plan=str(eager("dp_replicate=2")))
    with pytest.raises(UserError, match=r"the plan changed at step 4.*Try --step 3"):
        replay(copy, 5)


def test_steps_that_had_other_settings_are_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    run = load(copy / "run.toml")
    save_run(run.with_keys(optimizer={"lr": 2 * run.optimizer.lr}), copy / "run.toml")
    with pytest.raises(UserError, match=r"--step 4: step 3 had a learning rate of .*, and run\.toml now gives it"):
        replay(copy, 4)
    save_run(run, copy / "run.toml")
    Events(copy, "rank-0").write("resume", step=6, config_changed=True)
    with pytest.raises(UserError, match=r"--step 4: settings or data of the run changed at step 6, .* is of step 3"):
        replay(copy, 4)
