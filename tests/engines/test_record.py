"""The record of a launched job: what is done with one that somebody else may have written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from argosy.cli import main
from argosy.config.load import RUN_FILE
from argosy.engines.engine import ProgramJob
from argosy.engines.local import job_of
from argosy.engines.record import JOB_RECORD, LAUNCH_FOLDER, LaunchedJob
from argosy.engines.slurm import ARRAY_NOTE, Slurm
from argosy.engines.table import engine_of, state_of
from argosy.errors import UserError

NOBODY = 65534
GOOD: dict[str, dict[str, Any]] = {
    "slurm": {"id": "4711"},
    "kubernetes": {"id": "mine-0a1b2", "place": {"namespace": "training"}},
    "ray": {"id": "argosy-mine-0a1b", "place": {"address": "http://head:8265"}},
    "ssh": {"id": "h1,me@h2", "place": {"agent of h1": "12@345", "agent of me@h2": "13@345", "options": "-p 22"}},
    "login": {"id": "h1 slurm 4", "place": {"login": "h1", "folder": "/d", "program": "argosy", "run_dir": "/d/r"}},
    "local": {"id": "12@345"},
}


def write(run_dir: Path, engine: str, **changes: Any) -> Path:
    """Write a record as somebody else would, with a text editor."""
    record = {"engine": engine, "submitted_s": 0, "nodes": 1, **GOOD[engine], **changes}
    path = run_dir / LAUNCH_FOLDER / JOB_RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    path.chmod(0o644)
    return path


def loaded(run_dir: Path) -> LaunchedJob:
    job = LaunchedJob.load(run_dir)
    assert job is not None
    return job


@pytest.mark.parametrize("engine", GOOD)
def test_what_an_engine_writes_it_takes_again(tmp_path, engine):
    write(tmp_path, engine)
    job = loaded(tmp_path)
    job.save(tmp_path)
    assert loaded(tmp_path).is_sealed and not loaded(tmp_path).foreign
    assert engine_of(loaded(tmp_path)).name == engine


@pytest.mark.parametrize(
    ("engine", "changes"),
    [
        ("slurm", {"id": "--user=root"}),
        ("slurm", {"id": "4711\n"}),
        ("kubernetes", {"id": "--kubeconfig=/tmp/k"}),
        ("kubernetes", {"place": {"namespace": "a --kubeconfig=/tmp/k"}}),
        ("kubernetes", {"place": {}}),
        ("ray", {"id": "-x"}),
        ("ray", {"place": {"address": "antigravity://x"}}),
        ("ray", {"place": {}}),
        ("ssh", {"id": "-oProxyCommand=x"}),
        ("ssh", {"place": {"agent of -oProxyCommand=x": "1@2"}}),
        ("ssh", {"place": {"agent of h1": "1 2@3"}}),
        ("login", {"place": {**GOOD["login"]["place"], "login": "-oProxyCommand=x"}}),
        ("login", {"place": {"login": "h1"}}),
        ("local", {"id": "-1@2"}),
        ("local", {"id": "x"}),
    ],
)
def test_words_that_an_engine_never_writes_are_refused_though_the_seal_holds(tmp_path, engine, changes):
    write(tmp_path, engine, **changes)
    loaded(tmp_path).save(tmp_path)
    with pytest.raises(UserError, match=r"launch/job.json\) says .* never writes: somebody changed"):
        engine_of(loaded(tmp_path))


@pytest.mark.parametrize("engine", ["ssh", "login", "ray"])
def test_a_record_that_was_changed_or_comes_from_elsewhere_sends_nothing_anywhere(tmp_path, engine, monkeypatch):
    path = write(tmp_path, engine)
    assert state_of(loaded(tmp_path))[0] == "unknown" and "has no seal of yours" in state_of(loaded(tmp_path))[1]
    loaded(tmp_path).save(tmp_path)
    assert loaded(tmp_path).is_sealed
    path.write_text(path.read_text().replace("h1", "h3").replace("head", "tail"))
    with pytest.raises(UserError, match="has no seal of yours"):
        engine_of(loaded(tmp_path))
    loaded(tmp_path).save(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    assert not loaded(tmp_path).is_sealed and not (tmp_path / "another home").exists()


def test_a_record_that_others_may_write_is_shown_and_not_acted_upon(tmp_path):
    path = write(tmp_path, "slurm")
    path.chmod(0o664)
    state, why = state_of(loaded(tmp_path))
    assert state == "unknown" and "others too, who may write it (mode 0664; chmod go-w job.json)" in why
    loaded(tmp_path).save(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user's")
def test_a_record_of_another_user_is_shown_and_not_acted_upon(tmp_path, capsys):
    run = tmp_path / "runs/theirs"
    process = subprocess.Popen(command(run))
    try:
        path = write(run, "local", **started(process, run / LAUNCH_FOLDER / "local.out"))
        (run / LAUNCH_FOLDER / "local.out").write_text("step 1\x1b]0;owned\x07\n")
        os.chown(path, NOBODY, NOBODY)
        assert main(["runs", str(tmp_path / "runs")]) == 0
        listed = capsys.readouterr().out
        assert "theirs  unknown" in listed and f"(uid {NOBODY})" in listed and f"local {process.pid}@" in listed
        assert main(["stop", str(run)]) == 2
        assert "may be the work of" in capsys.readouterr().err and process.poll() is None
        assert main(["logs", str(run), "-f"]) == 0
        assert capsys.readouterr().out == "step 1\\x1b]0;owned\\x07\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(shutil.which("ssh") is None or shutil.which("kubectl") is None, reason="needs ssh and kubectl")
def test_listing_following_and_stopping_runs_nothing_that_a_folder_says(tmp_path, capsys):
    """A stranger's folder, copied: the files are this user's."""
    mark = tmp_path / "ran"
    proxy = f"-o 'ProxyCommand=sh -c \"id > {mark}\"'"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "touch", "args": [str(mark)],
              "interactiveMode": "Never"}  # fmt: skip
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"exec": plugin}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    write(tmp_path / "runs/a", "ssh", place={"agent of h1": "1@2", "options": proxy})
    write(tmp_path / "runs/b", "login", place={**GOOD["login"]["place"], "options": proxy})
    write(tmp_path / "runs/c", "kubernetes", id=f"--kubeconfig={tmp_path}/kubeconfig")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    for name in "abc":
        main(["logs", str(tmp_path / "runs" / name)])
        assert main(["stop", str(tmp_path / "runs" / name)]) == 2
    assert not mark.exists(), mark.read_text()
    assert "Traceback" not in capsys.readouterr().err


def started(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """What a record says of a process, all of it true."""
    return job_of(process.pid, log).model_dump(exclude={"engine"})


def command(run_dir: Path) -> list[str]:
    """A process whose words are those of an `argosy train` in a folder."""
    return [sys.executable, "-c", "import time; time.sleep(60)", "argosy", "train", "--run-dir", str(run_dir)]


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user's that trains nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "argosy", "train"])
    yield process
    process.kill()
    process.wait()


def test_a_forged_record_stops_no_process_of_its_reader(tmp_path, victim, capsys):
    run = tmp_path / "runs/a"
    write(run, "local", **started(victim, run / LAUNCH_FOLDER / "local.out"))
    assert main(["stop", str(run)]) == 0
    assert "has ended already" in capsys.readouterr().out and victim.poll() is None
    write(run, "local", **started(victim, Path()))
    assert main(["stop", str(run)]) == 0 and victim.poll() is None


def test_what_is_printed_is_looked_for_in_the_run_s_folder_only(tmp_path):
    write(tmp_path, "slurm", log="/etc/passwd")
    assert loaded(tmp_path).log == str(tmp_path / LAUNCH_FOLDER / "passwd")
    write(tmp_path, "ssh", log="/elsewhere/launch")
    assert loaded(tmp_path).log == str(tmp_path / LAUNCH_FOLDER)
    write(tmp_path, "slurm")
    assert loaded(tmp_path).log == ""


def test_a_record_that_is_a_link_or_no_file_is_refused(tmp_path):
    path = write(tmp_path, "slurm")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is no record of a launched run"):
        LaunchedJob.load(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is no record of a launched run"):
        LaunchedJob.load(tmp_path)


def test_without_a_home_a_job_is_recorded_without_a_seal(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / LAUNCH_FOLDER).mkdir()
    LaunchedJob(engine="slurm", id="4", submitted_s=0, nodes=1).save(tmp_path)
    assert not loaded(tmp_path).is_sealed and engine_of(loaded(tmp_path)).name == "slurm"


def test_the_job_of_a_folder_is_not_that_of_its_copy(tmp_path, monkeypatch, capsys):
    """`argosy stop` in the copy ended the job of the other folder, and nothing could be launched in the copy."""
    run, copy, link = (tmp_path / "runs" / name for name in ("run", "copy", "link"))
    monkeypatch.setattr(Slurm, "states", lambda self, jobs: [("running", "") for _ in jobs])
    monkeypatch.setattr(Slurm, "stop", lambda self, job: pytest.fail(f"{job.id} was stopped"))
    (run / LAUNCH_FOLDER).mkdir(parents=True)
    LaunchedJob.submitted("slurm", "4711", 1).save(run)
    (run / RUN_FILE).touch()
    shutil.copytree(run, copy)
    link.symlink_to(run)
    assert [state_of(loaded(folder))[0] for folder in (run, link, copy)] == ["running", "running", "ended"]
    assert main(["stop", str(copy)]) == 0
    assert f"its job 4711 on slurm is that of {run}, of which this is a copy" in capsys.readouterr().out
    (copy / LAUNCH_FOLDER / ARRAY_NOTE).write_text('{"name": "run", "task": 0}')
    monkeypatch.setattr(Slurm, "_left", {"4711": "run", "4711_0": "run"})
    program = ProgramJob(title="run", module="argosy", words=(), work_dir=tmp_path, log=copy / LAUNCH_FOLDER / "log")
    assert Slurm().find(program) is None
    shutil.rmtree(run)
    assert state_of(loaded(copy))[0] == "running"
