"""trackio's own storage reads what was logged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from run_folder import RunFolder

TELL = """
import json, sys
from pathlib import Path
from argosy.sinks.worker import SinkSession
told = SinkSession(Path(sys.argv[1]), "trackio")
told.catch_up()
if sys.argv[2] == "close":
    told.close()
else:
    told.sink._run.finish()
from trackio.sqlite_storage import SQLiteStorage
names = [record["name"] for record in SQLiteStorage.get_run_records("p")]
rows = SQLiteStorage.get_logs("p", told.sink.state["name"])
print(json.dumps([names, [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]]))
"""


@pytest.fixture
def tell(tmp_path: Path):
    """Tell the sink what is new, in a process of its own: trackio reads where its files are when it is imported."""

    def run(folder: Path, how: str = "close") -> list:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        command = [sys.executable, "-c", TELL, str(folder), how]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))

    return run


def test_a_run_is_one_trackio_run_whatever_stops_it(tmp_path, tell):
    run = RunFolder(tmp_path / "run", trackio={"project": "p", "folder": str(tmp_path / "trackio")})
    run.step(0)
    run.evaluation(1, 3.5)
    run.step(1)
    run.sample(1, "upon")
    run.event("recovered", step=2)
    assert tell(run.path) == [["tiny"], [[0, 0], [1, 1]]]
    run.step(2)
    assert tell(run.path, "killed") == [["tiny"], [[0, 0], [1, 1], [2, 2]]]
    assert tell(run.path) == [["tiny"], [[0, 0], [1, 1], [2, 2]]]
    run.lose_from(1)
    run.step(1, loss=9.0)
    assert tell(run.path) == [["tiny"], [[0, 0], [1, 9]]]


def test_another_run_of_the_same_name_has_a_name_of_its_own(tmp_path, tell):
    for name in ("one", "two"):
        run = RunFolder(tmp_path / name, trackio={"project": "p", "folder": str(tmp_path / "trackio")})
        run.step(0)
        names, rows = tell(run.path)
    assert (sorted(names), rows) == (["tiny", "tiny-2"], [[0, 0]])
