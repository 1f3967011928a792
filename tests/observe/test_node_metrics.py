"""A node's lines say what its ranks did since the line before, and grow no faster in a large world."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from argosy.observe import node_metrics
from argosy.observe.heartbeat import Heartbeat, HeartbeatReading, read_heartbeat
from argosy.observe.node_metrics import BYTES_PER_DAY, DAY_S, Instruments, NodeMetrics, lines_of_node


class Rank:
    """A worker that only shows its heartbeat."""

    def __init__(self, folder: Path, rank: int, generation: int = 1):
        folder.mkdir(parents=True, exist_ok=True)
        self.rank, self._heartbeat = rank, Heartbeat(folder)
        self.join(generation)

    def join(self, generation: int) -> None:
        self._heartbeat.join(generation, self.rank, dict)

    def step(self, step: int, forward_s: float = 0.1, sent: int = 100, microbatches: int = 1) -> None:
        self._heartbeat.begin(step)
        seconds = {"forward": forward_s, "other": 0.5, "step": forward_s + 0.5}
        communication = {"shard": {"node": [0.01, sent], "network": [0.02, 2 * sent]}}
        self._heartbeat.took(forward_s, seconds, communication, 1000 + self.rank, microbatches)

    def save(self, written: int) -> None:
        self._heartbeat.has_written(written)

    def reading(self) -> HeartbeatReading:
        found = read_heartbeat(self._heartbeat.path)
        assert found is not None
        return found

    def close(self) -> None:
        self._heartbeat.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    here = [Rank(tmp_path / str(rank), rank) for rank in (4, 5)]
    yield here
    for rank in here:
        rank.close()


@pytest.fixture
def metrics(tmp_path: Path) -> NodeMetrics:
    return NodeMetrics(lines_of_node(tmp_path, "a"), every_s=5.0)


def readings(ranks: list[Rank]) -> list[HeartbeatReading]:
    return [rank.reading() for rank in reversed(ranks)]


def test_a_line_has_means_over_the_steps_since_the_line_before(metrics, ranks):
    for step in range(3):
        for rank in ranks:
            rank.step(step, forward_s=0.1 * rank.rank)
    metrics.line(readings(ranks))
    for step in (3, 4):
        for rank in ranks:
            rank.step(step, forward_s=0.2 * rank.rank * (step - 2))
    ranks[0].save(5000)
    line = metrics.line(readings(ranks))
    assert line is not None and abs(line.pop("time_s") - time.time()) < 10
    assert json.loads(json.dumps(line)) == {
        "generation": 1,
        "ranks": [4, 5],
        "steps": [3, 4],
        "step_s": [1.7, 2.0],
        "seconds": {"forward": [1.2, 1.5], "other": [0.5, 0.5]},
        "own": [[3, [0.8, 1.0]], [4, [1.6, 2.0]]],
        "communication": {
            "shard": {
                "node": {"seconds": [0.01, 0.01], "bytes": [100, 100]},
                "network": {"seconds": [0.02, 0.02], "bytes": [200, 200]},
            }
        },
        "memory_bytes": [1004, 1005],
        "checkpoint_bytes": 5000,
    }


def test_steps_of_which_one_rank_has_ended_none_wait_for_the_next_line(metrics, ranks):
    ranks[0].step(0)
    line = metrics.line(readings(ranks))
    assert line is not None and "steps" not in line and "seconds" not in line and line["ranks"] == [4, 5]
    ranks[1].step(0)
    line = metrics.line(readings(ranks))
    assert line is not None and line["steps"] == [0, 0]
    assert [step for step, _ in line["own"]] == [0]


def test_a_new_world_is_counted_from_its_beginning_with_ranks_where_they_are_now(metrics, ranks):
    for rank in ranks:
        rank.step(7)
    metrics.line(readings(ranks))
    for rank, number in zip(ranks, (9, 2), strict=True):
        rank.rank = number
        rank.join(2)
        rank.step(5)
    line = metrics.line(readings(ranks))
    assert line is not None
    assert (line["generation"], line["ranks"], line["steps"]) == (2, [2, 9], [5, 5])


def test_a_rank_of_an_older_world_is_no_part_of_a_line(metrics, ranks):
    ranks[0].join(2)
    for rank in ranks:
        rank.step(0)
    line = metrics.line(readings(ranks))
    assert line is not None and line["ranks"] == [4]


def test_what_a_worker_showed_before_its_end_is_in_the_last_line(metrics, ranks):
    for rank in ranks:
        rank.step(0)
        metrics.ended(rank.reading())
    line = metrics.line([])
    assert line is not None and line["ranks"] == [4, 5] and line["steps"] == [0, 0]


class Asked(Instruments):
    """Tells what it is asked for."""

    def __init__(self) -> None:
        super().__init__(None, None, None)

    def measure(self, ranks: Sequence[int]) -> dict[str, Any]:
        return {"of": list(ranks)}


def test_devices_stay_those_of_all_ranks_of_the_world_after_ones_end(tmp_path, ranks):
    metrics = NodeMetrics(lines_of_node(tmp_path, "a"), 5.0, Asked())
    lines = [metrics.line(readings(ranks)), metrics.line([ranks[1].reading()])]
    assert [line and (line["ranks"], line["of"]) for line in lines] == [([4, 5], [4, 5]), ([5], [4, 5])]
    ranks[1].join(2)
    line = metrics.line([ranks[1].reading()])
    assert line is not None and line["of"] == [5]


def test_a_node_whose_workers_are_in_no_world_writes_nothing(metrics, tmp_path):
    metrics.write(list, world_size=8)
    assert not (tmp_path / "nodes").exists()


def test_own_seconds_of_many_steps_are_thinned_out_the_same_on_all_nodes(metrics, ranks):
    for step in range(3, 50):
        for rank in ranks:
            rank.step(step)
    line = metrics.line(readings(ranks))
    assert line is not None
    assert [step for step, _ in line["own"]] == [step for step in range(3, 50) if step % 4 == 0]
    assert line["steps"] == [3, 49]


def test_a_line_says_from_which_step_on_ranks_ran_how_many_microbatches(metrics, ranks):
    for step, shares in enumerate([(1, 1), (3, 1), (3, 1), (2, 2)]):
        for rank, many in zip(ranks, shares, strict=True):
            rank.step(step, microbatches=many)
    line = metrics.line(readings(ranks))
    assert line is not None and line["microbatches"] == [(1, [3, 1]), (3, [2, 2])]


def test_lines_of_a_large_world_come_so_rarely_that_all_nodes_write_a_gigabyte_a_day(
    metrics, ranks, monkeypatch, tmp_path
):
    began_s = now_s = time.monotonic()
    monkeypatch.setattr(node_metrics.time, "monotonic", lambda: now_s)
    asked = []

    def is_due(after_s: float) -> bool:
        nonlocal now_s
        now_s = began_s + after_s
        asked.clear()
        metrics.tend(lambda: asked.append(1) or [], world_size=2)
        now_s = began_s
        return bool(asked)

    for rank in ranks:
        rank.step(0)
    metrics.write(lambda: readings(ranks), world_size=2)
    assert not is_due(4.9) and is_due(5.1)
    for rank in ranks:
        rank.step(1)
    metrics.write(lambda: readings(ranks), world_size=16_384)
    size = len((tmp_path / "nodes" / "a.jsonl").read_bytes().splitlines(keepends=True)[-1])
    every_s = size * 8192 * DAY_S / BYTES_PER_DAY
    assert every_s > 60
    assert not is_due(0.99 * every_s) and is_due(1.01 * every_s)


def test_a_full_disk_costs_a_warning(tmp_path, ranks):
    (tmp_path / "nodes").write_text("no folder")
    for rank in ranks:
        rank.step(0)
    with pytest.warns(UserWarning, match="a record is lost"):
        NodeMetrics(lines_of_node(tmp_path, "a"), 5.0).write(lambda: readings(ranks), world_size=2)


def test_a_page_that_cannot_be_read_costs_a_warning(metrics):
    def damaged() -> list[HeartbeatReading]:
        raise ValueError("x.heartbeat is no heartbeat")

    with pytest.warns(UserWarning, match="a line is lost"):
        metrics.write(damaged, world_size=2)
