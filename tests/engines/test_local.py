"""Processes of this machine: which of them a record means."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.engines.engine import ProgramJob
from argosy.engines.local import Local, job_of
from argosy.engines.record import LAUNCH_FOLDER, LaunchedJob
from argosy.errors import UserError
from argosy.files import RUN_LOCK
from waiting import wait_until

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs/a run" / LAUNCH_FOLDER).mkdir(parents=True)
    return tmp_path / "runs/a run"


def trains(*words: str, cwd: Path, shell: bool = False) -> subprocess.Popen[bytes]:
    """A process with the words of an `argosy train`; shell: as the shell that is about to become it."""
    if shell:
        text = f"read line; cd {cwd} && exec python -m argosy train run.toml --run-dir '{words[-1]}'"
        return subprocess.Popen(["bash", "-c", text], stdin=subprocess.PIPE, cwd=cwd)
    return subprocess.Popen([*SLEEP, "argosy", "train", "run.toml", *words], cwd=cwd)


@pytest.fixture(params=["absolute", "relative", "program", "shell"])
def process(request: pytest.FixtureRequest, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains the run, however it was started."""
    folder = run.parent.parent
    if request.param == "program":
        started = subprocess.Popen([*SLEEP, "/opt/bin/argosy", "train", "--run-dir", str(run)])
    else:
        path = "runs/a run" if request.param == "relative" else str(run)
        started = trains("--run-dir", path, cwd=folder, shell=request.param == "shell")
    wait_until(Path(f"/proc/{started.pid}/cmdline").read_bytes)  # it is empty while the program is being loaded
    yield started
    started.kill()
    started.wait()


def test_the_process_that_trains_a_run_is_known_and_stopped(run, process):
    job = job_of(process.pid, run / LAUNCH_FOLDER / "local.out")
    assert Local().state(job) == ("running", f"process {process.pid}")
    Local().stop(job)
    assert process.wait(20) == -15
    assert Local().state(job) == ("ended", "")


@pytest.mark.parametrize("change", ["another run", "another time", "no file"])
def test_another_process_is_never_meant(run, change):
    other = run.parent / "another"
    other.mkdir()
    process = trains("--run-dir", str(other if change == "another run" else run), cwd=run)
    try:
        job = job_of(process.pid, Path() if change == "no file" else run / LAUNCH_FOLDER / "local.out")
        if change == "another time":
            job = job.model_copy(update={"id": f"{process.pid}@1"})
        assert Local().state(job) == ("ended", "")
        Local().stop(job)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_of_another_machine_is_not_taken_for_one_that_has_ended(run):
    job = job_of(os.getpid(), run / LAUNCH_FOLDER / "local.out")
    far = job.model_copy(update={"place": {"host": "far", "boot": "another"}})
    assert Local().state(far)[0] == "unknown" and "far" in Local().state(far)[1]
    with pytest.raises(UserError, match=r"its process is on far.*Give the command there"):
        Local().stop(far)
    before = job.model_copy(update={"place": {**job.place, "boot": "another"}})
    assert Local().state(before)[0] == "ended"  # this machine was started anew


def test_a_record_of_an_older_version_is_of_this_machine(run):
    job = LaunchedJob(engine="local", id="1@1", submitted_s=0, nodes=1, log=str(run / LAUNCH_FOLDER / "local.out"))
    assert Local().state(job)[0] == "ended"


def program(folder: Path, text: str, **options: object) -> ProgramJob:
    """A module `mine` of a folder, as a job."""
    (folder / "mine.py").write_text(text)
    return ProgramJob(
        title="mine", module="mine", words=("a b",), work_dir=folder, log=folder / "mine.out",
        environment={"GIVEN": "c d"}, **options,
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_program_has_its_words_and_environment_and_its_end_is_known(tmp_path):
    engine = Local()
    job = engine.start(program(tmp_path, "import os, sys\nprint(sys.argv[1:], os.environ['GIVEN'])\nsys.exit(3)"))
    assert b"".join(engine.logs(job, follow=True)) == b"['a b'] c d\n"
    assert engine.state(job)[0] == "ended" and engine.exit_code(job) == 3
    assert Local().exit_code(job) is None  # nobody else knows


def test_many_programs_are_stopped(tmp_path):
    engine = Local()
    jobs = engine.start_all([program(tmp_path, "import time\ntime.sleep(60)")] * 2)
    assert [state for state, _ in engine.states(jobs)] == ["running"] * 2
    engine.stop_all(jobs)
    for job in jobs:
        assert b"".join(engine.logs(job, follow=True)) == b""
        assert engine.exit_code(job) == -15


def test_the_process_that_holds_a_folder_is_found_without_a_record(run):
    text = "import fcntl, sys\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n" \
           "print(__import__('os').getpid(), file=file, flush=True)\nprint(flush=True)\nsys.stdin.read()"  # fmt: skip
    words = [sys.executable, "-c", text, str(run / RUN_LOCK), "argosy", "train", "--run-dir", str(run)]
    job = ProgramJob(title="mine", module="argosy", words=(), work_dir=run, log=run / LAUNCH_FOLDER / "local.out")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        found = Local().find(job)
        assert found is not None and found.id.startswith(f"{holder.pid}@") and Local().state(found)[0] == "running"
        found.save(run)
        assert Local().find(job) == LaunchedJob.load(run)
        holder.kill()
    assert Local().find(job) is None
