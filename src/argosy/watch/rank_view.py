"""Ranks by step as a map, and what the machines did, out of the lines of the agents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np

from argosy.observe.records import Record
from argosy.watch.columns import STEP_COLUMN, Floats
from argosy.watch.conclusions import conclusions_of
from argosy.watch.reader import RunReader

SHOWN_ROWS, SHOWN_COLUMNS = 256, 400
"""Size of a map, by default."""
MOST_SHOWN_ROWS, MOST_COLUMNS = 1024, 2000
NODE_LINES = 20_000
"""Most lines, over all nodes, that are read for one map. If there are more, evenly spread ones are read."""
MOST_SHOWN_NODES, NODE_POINTS = 64, 200
OWN_SERIES = "own"
COLUMN_UNITS = {"memory_bytes": "bytes"}
STRAGGLERS, LINKS, DEATHS = ("straggler", "node_slow", "suspect"), ("slow_link",), ("worker_died",)


def rank_map(
    reader: RunReader,
    key: str = OWN_SERIES,
    first: float | None = None,
    last: float | None = None,
    rows: int = SHOWN_ROWS,
    columns: int = SHOWN_COLUMNS,
    rank_from: int = 0,
    rank_to: int | None = None,
) -> dict[str, Any]:
    """Return `values[row][column]`: a row is a rank, or some neighbours, and a column a step, or some.

    The worst (largest) value of those behind a cell is shown; None where nothing is known. key: own (seconds of a
    rank's own work), step_s, memory_bytes, seconds.CATEGORY, or communication.AXIS.TIER.seconds (or .bytes).
    """
    slots = _slots(reader)
    ranks = sorted(rank for rank in slots if rank >= rank_from and (rank_to is None or rank <= rank_to))
    known = reader.steps[STEP_COLUMN]
    begin = known[0] if first is None and len(known) else first or 0
    end = known[-1] if last is None and len(known) else last or 0
    groups = [part for part in np.array_split(np.array(ranks, int), max(1, min(rows, len(ranks)))) if len(part)]
    row_of = {int(rank): n for n, group in enumerate(groups) for rank in group}
    steps_here = int(end - begin) + 1
    edges = np.unique(np.linspace(begin, end + 1, min(columns, max(1, steps_here)) + 1).astype(int))
    grid = np.full((len(groups), max(1, len(edges) - 1)), np.nan)
    all_there = True
    if groups:
        most = max(8, NODE_LINES // max(1, len(reader.nodes)))
        wanted = {slots[rank] for rank in ranks}
        for node in sorted(wanted & reader.nodes.keys()):
            records, are_all = reader.node_records(node, begin, end, most)
            all_there &= are_all
            for record in records:
                _fill(grid, edges, row_of, record, key)
    return {
        "key": key,
        "keys": _keys(reader),
        "unit": COLUMN_UNITS.get(key, "bytes" if key.endswith(".bytes") else "s"),
        "step": edges[:-1],
        "ranks": [[int(group[0]), int(group[-1])] for group in groups],
        "nodes": [slots[int(group[0])] for group in groups],
        "values": grid,
        "complete": all_there,
        "world": max(slots, default=-1) + 1,
        **_marks(reader, slots),
    }


def _slots(reader: RunReader) -> dict[int, str]:
    """Return rank -> node, as the newest world has them, or else the nodes' lines."""
    for event in reversed(reader.events):
        if event["event"] == "generation" and isinstance(event.get("ranks"), dict):
            return {rank: slot.rpartition("/")[0] for slot, rank in event["ranks"].items()}
    return {rank: node for node, series in reader.nodes.items() for rank in series.last.get("ranks", ())}


def _fill(grid: Floats, edges: Any, row_of: dict[int, int], record: Record, key: str) -> None:
    """Put the values of a node's line into the cells of its ranks and steps; the larger one stays."""
    rows = np.array([row_of.get(rank, -1) for rank in record.get("ranks", ())], int)
    for first, last, values in _values(record, key):
        here = min(len(rows), len(values))
        begin = max(0, int(np.searchsorted(edges, first, side="right")) - 1)
        end = min(grid.shape[1] - 1, int(np.searchsorted(edges, last, side="right")) - 1)
        if last < edges[0] or first >= edges[-1] or not here:
            continue
        inside = rows[:here] >= 0
        for column in range(begin, end + 1):
            np.fmax.at(grid[:, column], rows[:here][inside], values[:here][inside])


def _values(record: Record, key: str) -> Iterator[tuple[int, int, Floats]]:
    steps = record.get("steps")
    if key == OWN_SERIES:
        told = record.get(OWN_SERIES, [])
        end = steps[1] if steps else told[-1][0] if told else 0
        for entry, after in zip_longest(told, told[1:]):  # one of several steps: it stands for those up to the next
            yield entry[0], after[0] - 1 if after else max(entry[0], end), _floats(entry[1])
        return
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if steps and isinstance(value, list):
        yield steps[0], steps[1], _floats(value)


def _floats(values: Any) -> Floats:
    return np.array([value if isinstance(value, int | float) else np.nan for value in values], dtype=float)


def _keys(reader: RunReader) -> list[str]:
    """Return the keys that lines of nodes have by rank."""
    found: dict[str, None] = {}
    for series in list(reader.nodes.values())[:MOST_SHOWN_NODES]:
        last = series.last
        found |= {name: None for name in (OWN_SERIES, "step_s", "memory_bytes") if name in last}
        found |= {f"seconds.{name}": None for name in last.get("seconds") or {}}
        for axis, tiers in (last.get("communication") or {}).items():
            found |= {f"communication.{axis}.{tier}.{what}": None for tier in tiers for what in ("seconds", "bytes")}
    return list(found)


def _marks(reader: RunReader, slots: dict[int, str]) -> dict[str, list[dict[str, Any]]]:
    """Return stragglers, links and deaths by the run's events, and ranks that are slow now; `step` is the newest at the
    time.
    """
    times, steps = reader.steps["time_s"], reader.steps[STEP_COLUMN]
    marks: dict[str, list[dict[str, Any]]] = {"stragglers": [], "links": [], "deaths": []}
    for event in reader.events:
        kind = event["event"]
        named = event.get("ranks") if isinstance(event.get("ranks"), list) else [event.get("rank")]
        ranks: list[int] = [rank for rank in named or () if isinstance(rank, int)]
        at = int(np.searchsorted(times, event["time_s"], side="right")) - 1
        step = event["step"] if isinstance(event.get("step"), int) else int(steps[at]) if at >= 0 else None
        told = {"step": step, "time_s": event["time_s"], "why": str(event.get("why", ""))}
        if kind in LINKS:
            marks["links"].append({"ranks": ranks, **told})
        elif kind in (*STRAGGLERS, *DEATHS):
            each = [{"rank": rank, "node": slots.get(rank, ""), **told} for rank in ranks]
            each = each or [{"rank": None, "node": str(event.get("node", "")), **told}]
            marks["stragglers" if kind in STRAGGLERS else "deaths"] += each
    slow, (first, last) = conclusions_of(reader).slow_ranks
    for rank in slow.keys() - {mark["rank"] for mark in marks["stragglers"]}:  # shorter than the detector waits
        why = f"its own work takes {slow[rank]:.1f} times as long as its peers', median of steps {first} to {last}"
        marks["stragglers"].append(
            {"rank": rank, "node": slots.get(rank, ""), "step": first, "time_s": reader.alive_s, "why": why}
        )
    return {name: found[-1000:] for name, found in marks.items()}


def devices(reader: RunReader, first: float | None = None, last: float | None = None, points: int = NODE_POINTS) -> Any:
    """Return columns over time of devices and hosts, at most `points` long, for the first MOST_SHOWN_NODES nodes."""
    shown = list(reader.nodes)[:MOST_SHOWN_NODES]
    nodes = []
    for node in shown:
        records, _ = reader.node_records(node, first, last, min(points, NODE_POINTS))
        nodes.append({"node": node, "ranks": reader.nodes[node].last.get("ranks", []), **_columns(records)})
    return {"nodes": nodes, "more": len(reader.nodes) - len(shown)}


def _columns(records: list[Record]) -> dict[str, Any]:
    times = [record["time_s"] for record in records]
    found = []
    for index, device in enumerate(records[-1].get("devices", ()) if records else ()):
        each = [_at(record.get("devices", []), index) for record in records]
        numbers = [name for name, value in device.items() if isinstance(value, int | float)]
        columns = {name: [part.get(name) for part in each] for name in numbers}
        found.append({"name": device.get("name"), "ranks": device.get("ranks"), "time_s": times, **columns})
    hosts = [record.get("host", {}) for record in records]
    host = {name: [part.get(name) for part in hosts] for name in (hosts[-1] if hosts else {})}
    if "memory_bytes" in host:
        host["memory_bytes"] = hosts[-1]["memory_bytes"]
    return {"devices": found, "host": {"time_s": times, **host}}


def _at(parts: list[Record], index: int) -> Record:
    return parts[index] if index < len(parts) else {}
