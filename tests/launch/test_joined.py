"""Processes of another launcher have a heartbeat each, which the first one of a node reads; without memory none."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.launch.joined import _settle, check_world, read_heartbeats, train_joined
from argosy.observe.heartbeat import UNREAD
from argosy.parallel.world import World
from argosy.supervise import scratch
from tiny import run_config
from workers import WorkerPool


def made_a_step(world: World, run_dir: Path, node: str) -> bool:
    """Make a step that the rank tells of in its heartbeat; return True if anybody can read it."""
    run = run_config(Path("no data"), launch={"node": node})
    with read_heartbeats(run, run_dir, world, 3) as heartbeat:
        heartbeat.begin(5)
        heartbeat.took(0.25 + world.rank, {"step": 1.0, "forward": 0.25}, microbatches=1)
        world.barrier()  # the first one ends its lines with what the others tell by then
        return heartbeat is not UNREAD


@pytest.mark.parametrize(
    "wrong",
    [{"RANK": "x"}, {"RANK": "2"}, {"RANK": "-1"}, {"WORLD_SIZE": ""}, {"MASTER_ADDR": ""}, {"MASTER_PORT": "70000"}],
)
def test_an_environment_that_names_no_process_of_a_world_is_refused(wrong: dict[str, str]) -> None:
    right = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    check_world(right)
    with pytest.raises(UserError, match=r"RANK = .*: they name no process of a world. Start it with torchrun"):
        check_world(right | wrong)


def test_the_last_step_of_each_rank_of_a_node_is_in_its_line(workers: WorkerPool, tmp_path: Path):
    assert workers.run(2, made_a_step, tmp_path, "one") == [True, True]
    (path,) = (tmp_path / "nodes").iterdir()
    (found,) = (line for line in map(json.loads, path.read_text().splitlines()) if "steps" in line)
    assert (path.name, found["ranks"], found["steps"]) == ("one.jsonl", [0, 1], [5, 5])
    assert found["own"] == [[5, [0.25, 1.25]]] and found["seconds"] == {"forward": [0.25, 0.25]}


def test_without_room_in_memory_the_run_goes_on_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scratch, "SCRATCH", tmp_path / "nowhere")
    assert made_a_step(World(), tmp_path, "one") is False
    assert not (tmp_path / "nodes").exists()


def test_a_run_that_goes_on_has_no_report_of_an_earlier_end(corpus: Path, tmp_path: Path):
    """Else it would be shown as ended, with the goodput and energy of its first part."""
    for _ in range(2):
        with ExitStack() as held:
            _settle(run_config(corpus), tmp_path, World(), False, held)
        assert not (tmp_path / "report.json").exists()
        (tmp_path / "report.json").write_text('{"status": "stopped"}')


def test_the_report_of_a_finished_run_stays(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the run's goodput would fall, and its energy rise, with each time that the command is given."""
    generations, report = [], tmp_path / "report.json"
    for finished in (None, report):
        monkeypatch.setattr("argosy.launch.joined.report_if_finished", lambda *_, found=finished: found)
        with ExitStack() as held:
            generations.append(_settle(run_config(corpus), tmp_path, World(), False, held)[-1])
        assert report.exists() == bool(finished)
        report.write_text('{"status": "finished"}')
    assert generations == [1, None]


def test_a_parameter_server_is_not_one_of_torchrun_s_processes(tmp_path: Path):
    sites = [{"name": "oslo"}, {"name": "lyon"}]
    run = RunConfig.model_validate({"plan": "auto,sync=async", "site": "server-1", "sites": sites})
    with pytest.raises(UserError, match=r"server-1.* is a parameter server, which is one process"):
        train_joined(run, tmp_path / "run", accept_changes=False)
    assert not (tmp_path / "run").exists()
