"""What an older version has written goes on with this one: prepared data, a run's folder with its run file, its state.

The older version is the package of a commit from before keys of the run file were renamed; there is no release yet.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from argosy.observe.events import read_lines
from commands import Folder
from waiting import PATIENT_S

ROOT = Path(__file__).parents[2]
OLDER = "0964885d"
OLD_KEY, NEW_KEY = "examine_s", "node_check_s"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The source of the older version; a test is skipped where the history is not there (an sdist, a shallow clone)."""
    git = ["git", "-C", str(ROOT), "archive", OLDER, "src"]
    try:
        archive = subprocess.run(git, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {OLDER} is not there: git fetch --unshallow")
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tmp_path / "older", filter="data")
    return tmp_path / "older" / "src"


@pytest.mark.slow
def test_data_a_run_file_and_a_run_of_an_older_version_go_on(folder: Folder, older: Path) -> None:
    def with_older(*words: object) -> None:
        path = os.pathsep.join([str(older), os.environ.get("PYTHONPATH", "")])
        process = folder.start(*words, PYTHONPATH=path)
        out, err = process.communicate(timeout=PATIENT_S)
        assert process.returncode == 0, f"{out}\n{err}"

    sources = sorted((ROOT / "src").rglob("*.py"))[:99]
    (folder.path / "text.py").write_text("".join(path.read_text() for path in sources))
    folder.corpus = folder.path / "data"
    with_older("prepare", "text.py", "--out", folder.corpus, "--vocab-size", 300)
    constant = ("--schedule.kind", "constant")  # so that a longer run repeats the shorter one's steps
    run_file = folder.write_run(steps=12, every_steps=3)
    run_file.write_text(run_file.read_text().replace(NEW_KEY, OLD_KEY))
    with_older("train", run_file, *constant, "--run-dir", "runs/straight")
    with_older("train", run_file, *constant, "--run-dir", "runs/tiny", "--train.steps", 6)
    run_dir = folder.path / "runs/tiny"
    assert OLD_KEY in (run_dir / "run.toml").read_text(), "it was not the older version that wrote it"

    folder.argosy("checkpoint", "verify", "runs/tiny")
    said = folder.argosy("train", run_file, *constant, "--run-dir", "runs/tiny")
    assert "from step 6" in said and f"resilience.{OLD_KEY} is called resilience.{NEW_KEY} now" in said
    for metric in ("loss", "grad_norm"):
        straight, tiny = (
            [line[metric] for line in read_lines(folder.path / "runs" / name / "metrics.jsonl") if metric in line]
            for name in ("straight", "tiny")
        )
        assert straight == tiny and len(tiny) == 12, metric
    assert "finished, step 12 of 12" in folder.argosy("status", "runs/tiny")
