"""Ranks by step as a map."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from argosy.watch.rank_view import rank_map
from argosy.watch.reader import RunReader
from run_folders import Made, Trouble


def test_a_slow_rank_is_marked_before_the_detector_is_sure_and_steps_that_are_not_told_leave_no_hole(
    tmp_path: Path,
) -> None:
    folder = Made(ranks=2, trouble=Trouble(straggler=(1, 20))).write(tmp_path / "run")
    for process in (folder / "events").iterdir():
        lines = [line for line in process.read_text().splitlines(keepends=True) if '"straggler"' not in line]
        process.write_text("".join(lines))
    for node in (folder / "nodes").iterdir():
        lines = [json.loads(line) for line in node.read_text().splitlines()]
        kept = [line | {"own": line["own"][::4]} for line in lines]  # as agents do where there are many steps
        node.write_text("".join(json.dumps(line) + "\n" for line in kept))
    reader = RunReader.read(folder)
    found = rank_map(reader)
    assert np.isfinite(found["values"]).all()
    assert found["values"][1][150] > 1.8 * found["values"][0][150]
    (slow,) = found["stragglers"]
    assert slow["rank"] == 1 and "times as long as its peers" in slow["why"]
