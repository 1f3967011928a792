"""What is said to SLURM's programs, and what their answers mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.processes.slurm import ask, directives, listed, meaning, output

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
REFUSED = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed"


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, says: str, code: int) -> None:
    """Put a program on the path that answers as one of SLURM's; a real cluster is asked in tests/system."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat >&2 <<END\n{says}\nEND\nexit {code}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_controller_that_is_away_says_nothing_of_a_job(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "squeue", says=AWAY, code=1)
    with pytest.raises(UserError, match=r"squeue says: .*Unable to contact slurm controller"):
        listed("--jobs=4")


def test_only_an_unknown_number_is_a_job_that_has_ended(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "squeue", says="slurm_load_jobs error: Invalid job id specified", code=1)
    assert listed("--jobs=4") == []
    assert meaning("") == "ended" and meaning("CANCELLED") == "ended"
    assert meaning("PENDING") == "waiting" and meaning("RUNNING") == "running"
    assert meaning("RESIZING") == "running"  # a word that is not in the table is no end


def test_each_line_of_a_refusal_stays_a_line(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "sbatch", says=REFUSED, code=1)
    with pytest.raises(UserError) as refused:
        ask("sbatch", "job.sh")
    assert str(refused.value).splitlines()[:2] == [
        "--on slurm: sbatch refuses: sbatch: error: invalid partition specified: nope",
        "  sbatch: error: Batch job submission failed",
    ]


def test_values_are_quoted_where_sbatch_would_split_or_replace_them():
    where = output('/data/my runs/50% "a"', "slurm-%j.out")
    assert directives({"output": where, "time": "1:00", "account": ""}) == [
        '#SBATCH --output="/data/my runs/50%% \\"a\\"/slurm-%j.out"',
        "#SBATCH --time=1:00",
    ]


@pytest.mark.parametrize("value", ["a\nscontrol shutdown", "a\\b", "a\x1b[2J"])
def test_a_value_that_cannot_stand_in_a_line_is_refused(value):
    with pytest.raises(UserError, match=r"--on slurm: output = .* cannot be given to sbatch"):
        directives({"output": value})
