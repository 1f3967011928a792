""""""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from argosy.observe.records import MOST_LINE_BYTES
from argosy.watch import nodes
from argosy.watch.nodes import NodeSeries
from run_folders import append


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeSeries:
    """2000 lines, a second apart, of which a stretch of more than 4 kB is not read whole."""
    monkeypatch.setattr(nodes, "NODES_READ_WHOLE_BYTES", 4096)
    append(tmp_path / "n.jsonl", *({"time_s": float(n), "padding": "x" * (n % 90)} for n in range(2000)))
    found = NodeSeries(tmp_path / "n.jsonl")
    found.refresh()
    return found


def test_the_first_and_the_last_line_are_known(series: NodeSeries) -> None:
    assert (series.first["time_s"], series.last["time_s"]) == (0.0, 1999.0)


@pytest.mark.parametrize(("first_s", "last_s"), [(0, 10), (500.5, 520), (1995, 3000), (7, 7), (-5, 0)])
def test_a_short_stretch_is_there_line_by_line(series: NodeSeries, first_s: float, last_s: float) -> None:
    records, all_there = series.records(first_s, last_s)
    assert [record["time_s"] for record in records] == [float(n) for n in range(2000) if first_s <= n <= last_s]
    assert all_there


def test_of_a_long_stretch_lines_come_that_are_evenly_spread(series: NodeSeries) -> None:
    records, all_there = series.records(100, 1900, most=100)
    times = [record["time_s"] for record in records]
    assert not all_there
    assert 40 <= len(times) <= 110
    assert times == sorted(set(times))
    assert times[0] < 150 and times[-1] > 1850
    assert max(b - a for a, b in pairwise(times)) < 80


def test_what_is_added_is_seen(series: NodeSeries, tmp_path: Path) -> None:
    append(tmp_path / "n.jsonl", {"time_s": 2000.0}, b'{"time_s": 2001')
    assert series.refresh()
    assert series.last["time_s"] == 2000.0
    assert [record["time_s"] for record in series.records(1999)[0]] == [1999.0, 2000.0]
    assert not series.refresh()


def test_a_file_that_is_gone_has_no_lines(tmp_path: Path) -> None:
    found = NodeSeries(tmp_path / "none.jsonl")
    assert not found.refresh()
    assert found.records() == ([], True)


def test_a_line_without_end_is_no_record_and_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    append(path, {"time_s": 1.0})
    with path.open("ab") as file:
        file.truncate(8 * MOST_LINE_BYTES)
    tracemalloc.start()
    found = NodeSeries(path)
    found.refresh()
    assert [record["time_s"] for record in found.records(0.5)[0]] == [1.0] == [found.last["time_s"]]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * MOST_LINE_BYTES
