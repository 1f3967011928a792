"""The facts of a run are what its folder tells: of nodes, of long runs, of disks and power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.watch import conclusions
from argosy.watch.conclusions import DISK_S, READ_NODES, advise, conclusions_of, facts_of
from argosy.watch.reader import RunReader
from watched import BEGAN_S, STEPS, columns, start

SLOW = 5


def write_run(folder: Path, nodes: int = 2, per_node: int = 4, count: int = STEPS) -> RunReader:
    """A run's folder with healthy steps, and lines of nodes in which rank `SLOW` takes twice as long."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = columns(count)
    with (folder / "metrics.jsonl").open("w") as file:
        for row in range(count):
            flat = {key: float(values[row]) for key, values in steps.items()}
            seconds = {key.removeprefix("seconds."): flat.pop(key) for key in list(flat) if key.startswith("seconds.")}
            file.write(json.dumps({**flat, "step": row, "seconds": seconds}) + "\n")
    (folder / "events").mkdir(exist_ok=True)
    (folder / "events/rank-0.jsonl").write_text(json.dumps(dict(start())) + "\n")
    (folder / "nodes").mkdir(exist_ok=True)
    for node in range(nodes):
        ranks = list(range(node * per_node, (node + 1) * per_node))
        lines = [
            node_line(number, ranks, float(steps["time_s"][count - 40 + 10 * number]), count) for number in range(4)
        ]
        (folder / f"nodes/node{node}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunReader.read(folder)


def node_line(number: int, ranks: list[int], time_s: float, count: int) -> dict[str, Any]:
    first = count - 40 + 10 * number
    own = [0.6 if rank == SLOW else 0.3 for rank in ranks]
    return {
        "time_s": time_s, "generation": 1, "ranks": ranks, "steps": [first, first + 9], "step_s": [0.4] * len(ranks),
        "seconds": {"forward": [0.4 if rank == SLOW else 0.1 for rank in ranks]},
        "own": [[step, own] for step in range(first, first + 10)],
        "memory_bytes": [1e9 + rank for rank in ranks],
        "devices": [{"ranks": ranks, "name": "H100", "utilisation": 0.9, "power_w": 700.0, "clock_mhz": 1980}],
        "host": {"disk_free_bytes": 1e12 - number * 1e9},
        "energy": {"joules": 4000.0, "source": "nvml", "total_joules": 4000.0 * (number + 1),
                   "total_device_s": 4.0 * len(ranks) * (number + 1)},
    }  # fmt: skip


def test_ranks_of_all_nodes_come_together(tmp_path: Path):
    facts = facts_of(write_run(tmp_path / "run"), BEGAN_S + 200)
    assert facts.ranks is not None
    assert facts.ranks.own_s.shape == (40, 8) and not np.isnan(facts.ranks.own_s).any()
    assert facts.ranks.nodes[SLOW] == "node1" and facts.ranks.own_s[0, SLOW] == 0.6
    assert facts.ranks.memory_bytes is not None and facts.ranks.memory_bytes[7] == 1e9 + 7
    assert facts.power_w == pytest.approx(2 * 3 * 4000 / 12, rel=0.05) and facts.power_source == "nvml"
    assert {disk.node for disk in facts.disks} == {"node0", "node1"}
    assert facts.devices[1].ranks == (4, 5, 6, 7) and facts.devices[1].clock_mhz == 1980
    straggler = {advice.rule: advice for advice in advise(facts)}["straggler"]
    assert straggler.facts["rank"] == SLOW and "node1" in straggler.title and "forward" in straggler.evidence


def test_power_is_that_of_the_time_that_the_run_had_though_it_was_stopped_and_lines_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_run(tmp_path / "run")
    for path in (tmp_path / "run/nodes").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines[2:]:
            line["time_s"] += 50_000
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for most in (conclusions.MOST_CONCLUSION_LINES, 3):
        monkeypatch.setattr(conclusions, "MOST_CONCLUSION_LINES", most)
        assert facts_of(RunReader.read(tmp_path / "run")).power_w == pytest.approx(2 * 1000)


@pytest.mark.parametrize("nodes", [2, READ_NODES + 1])
def test_a_line_older_than_an_hour_tells_of_no_disk(tmp_path: Path, nodes: int):
    reader = write_run(tmp_path / "run", nodes=nodes, per_node=1)
    newest_s = max(series.last["time_s"] for series in reader.nodes.values())
    assert len(facts_of(reader, newest_s + DISK_S - 60).disks) == nodes
    assert facts_of(reader, newest_s + DISK_S + 60).disks == ()


@pytest.mark.parametrize("left", [[4, 5, 6], [4, 6, 7], []])
def test_a_rank_that_is_in_no_later_line_keeps_its_place(tmp_path: Path, left: list[int]):
    write_run(tmp_path / "run")
    path = tmp_path / "run/nodes/node1.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1] = node_line(3, left, lines[-1]["time_s"], STEPS)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = facts_of(RunReader.read(tmp_path / "run"), BEGAN_S + 200)
    assert facts.ranks is not None and facts.ranks.numbers.tolist() == list(range(8))
    before, last = facts.ranks.own_s[:30], facts.ranks.own_s[30:]
    assert (before[:, SLOW] == 0.6).all() and (np.delete(before, SLOW, axis=1) == 0.3).all()
    assert np.isnan(last[:, [rank for rank in range(4, 8) if rank not in left]]).all()


def test_ranks_with_unlike_shares_are_compared_by_their_time_for_a_microbatch(tmp_path: Path):
    write_run(tmp_path / "run")
    for path in (tmp_path / "run/nodes").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            many = [2 if rank == SLOW else 1 for rank in line["ranks"]]
            line["microbatches"] = [[line["own"][0][0], many]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = RunReader.read(tmp_path / "run")
    facts = facts_of(reader)
    assert facts.ranks is not None and facts.ranks.microbatches is not None
    assert set(facts.ranks.microbatches[:, SLOW]) == {2.0} and facts.ranks.microbatches.sum() == 9 * 40
    assert "straggler" not in {advice.rule for advice in advise(facts)}


def test_lines_of_an_older_world_and_of_silent_nodes_do_not_count(tmp_path: Path):
    write_run(tmp_path / "run", nodes=3)
    for name, changes in {"node0": {"time_s": BEGAN_S - 5000}, "node2": {"generation": 0}}.items():
        path = tmp_path / f"run/nodes/{name}.jsonl"
        lines = [json.loads(line) | changes for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = RunReader.read(tmp_path / "run")
    ranks = facts_of(reader).ranks
    assert ranks is not None and set(ranks.nodes) == {"node1"}


def test_of_many_nodes_the_newest_lines_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conclusions, "READ_NODES", 2)
    facts = facts_of(write_run(tmp_path / "run", nodes=4))
    assert facts.ranks is not None and facts.ranks.own_s.shape == (10, 16)
    assert "straggler" in {advice.rule for advice in advise(facts)}


def test_a_long_run_is_judged_by_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = write_run(tmp_path / "run")
    whole = facts_of(reader)
    monkeypatch.setattr(conclusions, "KNOWN", 250)
    with monkeypatch.context() as patched:
        patched.setattr(conclusions, "from_the_end", None)
        last = facts_of(reader)
        assert last.step_s == whole.step_s, "alerts need no other keys: the last lines are not read for each"
    assert last.known == (150, 399) and whole.known == (0, 399)
    assert np.isnan(last.column("seconds.forward")[:150]).all()
    assert last.typical == whole.typical and last.share("backward") == whole.share("backward")
    assert last.mean_s("forward", slice(0, STEPS)) == pytest.approx(whole.mean_s("forward"), rel=0.01)


def test_conclusions_are_about_the_steps_that_there_were_when_they_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conclusions, "KNOWN", 250)
    reader = write_run(tmp_path / "run")
    facts = conclusions_of(reader).facts
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": STEPS, "loss": 2.0}) + "\n")
    reader.refresh()
    assert len(reader.steps) == STEPS + 1 and conclusions_of(reader).facts is facts
    assert len(facts) == len(facts.column("seconds.step")) == STEPS


def test_conclusions_are_kept_until_the_run_says_more(tmp_path: Path):
    reader = write_run(tmp_path / "run")
    assert conclusions_of(reader).advice is conclusions_of(reader).advice
    assert conclusions_of(reader).forecast is None, "without a run file nobody knows how long it is"
    assert [alert.alert for alert in conclusions_of(reader).alerts] in (["stall", "dead"], ["dead", "stall"]), (
        "its lines are old"
    )
