"""What is known of jobs on hosts, and behind a login, when nobody is reached there."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.config.schema import RunConfig
from argosy.engines import ssh
from argosy.engines.engine import RunJob
from argosy.engines.login import Login, LoginJob
from argosy.engines.record import LaunchedJob
from argosy.engines.ssh import Ssh, ask_all, command, environment_of
from argosy.errors import UserError
from argosy.processes.child import process_state
from ports import free_port
from run_folders import Made
from waiting import wait_until

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh: apt-get install openssh-client")
NOBODY_LISTENS = f"-F none -o HostName=127.0.0.1 -p {free_port()}"


def test_hosts_that_cannot_be_reached_may_still_train():
    place = {"agent of h1": "1@1", "agent of h2": "1@1", "options": NOBODY_LISTENS}
    job = LaunchedJob(engine="ssh", id="h1,h2", submitted_s=0, nodes=2, log="/shared/runs/mine/launch", place=place)
    state, why = Ssh().state(job)
    assert state == "unknown" and "no way to h1 (ssh: connect to host" in why and "h2 (" in why


def test_a_login_that_cannot_be_reached_says_nothing_of_its_run():
    place = {"login": "h1", "options": NOBODY_LISTENS, "folder": "/d", "program": "argosy", "run_dir": "/d/runs/a"}
    job = LaunchedJob(engine="login", id="h1 4", submitted_s=0, nodes=1, place=place)
    state, why = Login().state(job)
    assert state == "unknown" and "no way to h1 (ssh: connect to host" in why


def test_what_becomes_of_a_run_behind_a_login_is_what_argosy_says_there(tmp_path, monkeypatch):
    for name, text in (
        ("ssh", 'for last; do :; done\nexec sh -c "$last"'),  # to this machine
        ("argosy", f'exec {sys.executable} -m argosy "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = {"login": "h1", "folder": str(tmp_path), "program": str(tmp_path / "argosy"), "run_dir": "runs/a"}
    job = LaunchedJob(engine="login", id="h1 4", submitted_s=0, nodes=1, place=place)
    assert Login().state(job)[0] == "unknown"
    Made(steps=3).write(tmp_path / "runs/a")
    state, why = Login().state(job)
    assert (state, why.split()[0], Login().step(job)) == ("ended", "finished", 3)


def test_a_host_s_start_file_may_print_and_its_server_may_keep_the_address_to_itself(tmp_path, monkeypatch):
    text = 'printf "\\033]0;h1\\007"\nfor last; do :; done\nexec sh -c "$last"'  # a title, without an end of line
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{text}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert ask_all({"h1": "echo argosy:boot=7"}, ())["h1"].said == {"boot": "7"}
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    job = RunJob(run=RunConfig(), run_dir=tmp_path / "a", words=("run.toml",), work_dir=tmp_path, hosts="h1")
    job.folder.mkdir(parents=True)
    with pytest.raises(UserError, match="h1 does not say at which address it was reached"):
        Ssh().start(job)


def test_an_agent_that_ends_at_once_is_not_taken_for_a_launched_one(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')  # to this machine
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 4711 10.0.0.1 22")
    job = RunJob(run=RunConfig(), run_dir=tmp_path / "a", words=("run.toml",), work_dir=tmp_path, hosts="h1")
    (job.folder / "h1.out").mkdir(parents=True)  # no file to write to, as in a folder of another user's
    with pytest.raises(UserError, match=r"could not be started on h1 \(.*h1\.out: Is a directory"):
        Ssh().start(job)


def test_an_agent_whose_start_was_not_answered_is_ended(tmp_path, monkeypatch):
    lost = 'answer=$(sh -c "$last"); case $answer in *argosy:agent=*) kill -9 $$;; esac; echo "$answer"'
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nfor last; do :; done\n{lost}\n")  # to this machine
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 4711 10.0.0.1 22")
    monkeypatch.setattr(ssh, "_command", lambda *_: "sleep 60")
    job = RunJob(run=RunConfig(), run_dir=tmp_path / "a", words=("run.toml",), work_dir=tmp_path, hosts="h1")
    job.folder.mkdir(parents=True)
    with pytest.raises(UserError, match="could not be started on h1"):
        Ssh().start(job)
    pid = int((job.folder / "h1.agent").read_text().partition("@")[0])
    assert wait_until(lambda: process_state(pid) in ("", "Z"))


def test_a_host_is_never_an_option():
    assert command("-oProxyCommand=x", ["-p", "22"], "true")[-3:] == ["--", "-oProxyCommand=x", "true"]


def test_a_folder_is_what_it_is_called_in_the_commands_that_are_shown():
    folder = Path("/shared/my runs")
    request = RunJob(run=RunConfig(), run_dir=folder / "runs/a", words=("run.toml",), work_dir=folder, hosts="h1,h2")
    first, second = (line for line in Ssh().script(request).splitlines() if not line.startswith("#"))
    assert shlex.split(first)[:3] == shlex.split(second)[:3] == ["cd", str(folder), "&&"]
    assert shlex.split(replace(request, hosts="h1").command)[-1] == str(folder / "runs/a")


def test_agents_get_the_credentials_of_stores_sinks_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig.model_validate({"observe": {"alerts": {"webhook_env": "MY_HOOK"}}})
    wanted = {"GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_ACCOUNT_KEY", "WANDB_API_KEY", "MY_HOOK"}
    for name in (*wanted, "MY_OTHER"):
        monkeypatch.setenv(name, "x")
    job = RunJob(run=run, run_dir=Path("/shared/runs/a"), words=("run.toml",), work_dir=Path("/shared"), hosts="h1")
    assert wanted < environment_of(job).keys() and "MY_OTHER" not in environment_of(job)


def test_the_command_behind_a_login_is_given_in_its_folder_there(tmp_path: Path) -> None:
    group = tmp_path / "runs" / "my run"
    job = LoginJob(
        run=RunConfig(), run_dir=group / "sites/oslo", words=("sites.toml", "--site", "oslo"),
        work_dir=tmp_path, login="ann@h1", login_options=("-p2222",), there="/data/my work", program="/opt/bin/argosy",
        group=group, group_there=Path("/data/my work/runs/my run"), run_dir_there=Path("/x"),
    )  # fmt: skip
    where, command = Login().script(job).splitlines()
    assert where == "# on ann@h1"
    assert shlex.split(command) == [
        "cd", "/data/my work", "&&", "/opt/bin/argosy", "launch", "sites.toml", "--site", "oslo", "--here",
        "--run-dir", "/data/my work/runs/my run",
    ]  # fmt: skip
