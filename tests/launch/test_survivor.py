"""At the end of a task of a batch job: whether the batch script is lost, and who is the last."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from argosy.errors import StorageError, UserError
from argosy.launch import requeue, survivor
from argosy.launch.requeue import decide
from argosy.launch.survivor import do_others_run, is_lost, was_there_at_the_end
from ports import free_port


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor, "CALL_AGAIN_S", 0.0)
    monkeypatch.setattr(requeue, "CONTROLLER_AGAIN_S", 0.0)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def shown(port: int, state: str = "MIXED") -> str:
    return f"NodeName=n1 Arch=x86_64\n   NodeAddr=127.0.0.1 NodeHostName=here Port={port}\n   State={state} Weight=1\n"


def test_a_node_whose_slurmd_answers_is_there(port):
    assert not is_lost("n1", lambda _: shown(port))


@pytest.mark.parametrize("state", ["DOWN", "MIXED*", "ALLOCATED+NOT_RESPONDING", "DOWN*+DRAIN"])
def test_a_node_that_slurm_has_given_up_is_lost(port, state):
    assert is_lost("n1", lambda _: shown(port, state))


def test_a_node_is_lost_if_its_slurmd_answers_no_call(port):
    closed = free_port()
    calls: list[str] = []
    assert is_lost("n1", lambda node: calls.append(node) or shown(closed))
    assert calls == ["n1"] * survivor.CALLS
    answers = iter([shown(closed), shown(port)])
    assert not is_lost("n1", lambda _: next(answers)), "it was only busy"


def test_a_controller_that_does_not_answer_is_asked_again(port):
    def ask(_: str) -> str:
        if not calls:
            calls.append("first")
            raise UserError("no answer")
        return shown(port)

    calls: list[str] = []
    assert not is_lost("n1", ask)


def test_an_answer_without_an_address_is_asked_for_again(port):
    answers = iter(["", "slurm_load_node: half a li", shown(port) + "   Reason=State=DOWN NodeAddr=nowhere\n"])
    assert not is_lost("n1", lambda _: next(answers))


def test_a_node_was_there_at_the_end_if_the_last_world_had_it(tmp_path):
    assert not was_there_at_the_end(tmp_path, "n1"), "there was none"
    (tmp_path / "events").mkdir()
    with (tmp_path / "events" / "coordinator.jsonl").open("w") as file:
        for ranks in ({"n1/0": 0, "n2/0": 1}, {"n2/0": 0, "n10/0": 1}):
            file.write(json.dumps({"event": "generation", "ranks": ranks}) + "\n")
            file.write(json.dumps({"event": "agent_left", "node": "n1"}) + "\n")
    assert [was_there_at_the_end(tmp_path, node) for node in ("n1", "n2", "n10")] == [False, True, True]


def test_agents_that_still_run_are_waited_for(tmp_path):
    for node in ("n1", "n2", "n3"):
        (tmp_path / f".lock-{node}").touch()
    with (tmp_path / ".lock-n1").open() as lost, (tmp_path / ".lock-n3").open() as other:
        fcntl.flock(lost, fcntl.LOCK_EX)
        assert not do_others_run(tmp_path, {"n1", "n2"})
        fcntl.flock(other, fcntl.LOCK_EX)
        assert do_others_run(tmp_path, {"n1", "n2"})


def test_survivors_of_one_job_count_it_once(tmp_path, monkeypatch):
    """Of three jobs in a row without a step, the third is the last; several tasks may ask at its end."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "run.toml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    found = []
    for start in range(4):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(start))
        found.append({decide(tmp_path, 75)[0] for _ in range(3)})
    assert found == [{75}, {75}, {75}, {1}]


@pytest.mark.parametrize(("code", "found"), [(138, 75), (143, 75), (137, 75), (2, 2)])
def test_a_run_that_a_signal_has_ended_before_it_began_is_to_run_again(tmp_path, code, found):
    (tmp_path / "launch").mkdir()
    assert decide(tmp_path, code) == (found, "the run did not begin")


@pytest.mark.parametrize(("array", "job"), [({}, "7"), ({"ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "2"}, "7_2")])
def test_a_task_of_an_array_is_requeued_without_the_others(tmp_path, monkeypatch, array, job):
    """One of them has the number of the array, by which all would be requeued, or cancelled, also those that ended."""
    (tmp_path / "launch").mkdir()
    for program in ("scontrol", "squeue"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {"JOB_ID": "7", **array}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(sys, "argv", ["requeue", str(tmp_path), "138"])
    with pytest.raises(SystemExit):
        requeue.main()
    survivor.end_the_job(tmp_path, 138, os.environ)
    asked = (tmp_path / "asked").read_text().splitlines()
    look = "--noheader --states=all"
    assert asked == [f"{look} --jobs={job}", f"requeue {job}", f"{look} --format=%T --jobs={job}"]


def test_a_controller_that_is_away_at_the_end_of_a_job_is_waited_for(tmp_path, monkeypatch):
    """It is being started again, say: a job that is not requeued then would never go on."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "squeue").write_text(
        f"#!/bin/sh\necho $1 >> {tmp_path}/asked; [ $(wc -l < {tmp_path}/asked) = 3 ] && exit 0\n"
        "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/asked\n")
    for program in ("scontrol", "squeue"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(tmp_path), "138"])
    with pytest.raises(SystemExit):
        requeue.main()
    assert (tmp_path / "asked").read_text().split() == ["--noheader"] * 3 + ["requeue"]


def test_a_job_that_slurm_does_not_requeue_says_why_and_ends_with_75(tmp_path, monkeypatch, capsys):
    (tmp_path / "launch").mkdir()
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\necho $1 >> {tmp_path}/asked; echo 'Requested operation is presently disabled' >&2; exit 1\n"
    )
    for program in ("scontrol", "squeue"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(sys, "argv", ["requeue", str(tmp_path), "138"])
    with pytest.raises(SystemExit) as end:
        requeue.main()
    assert end.value.code == 75
    assert (tmp_path / "asked").read_text().split() == ["requeue"] * requeue.REQUEUE_TRIES
    assert "Requested operation is presently disabled\n  The job ends with 75: launch" in capsys.readouterr().out


def test_a_job_whose_count_cannot_be_written_is_not_requeued(tmp_path, monkeypatch):
    """On a full disk, say: without the count it might be requeued for ever."""
    (tmp_path / "run.toml").touch()  # and no folder for launches
    code, why = decide(tmp_path, 75)
    assert code == StorageError.exit_code and "No such file or directory" in why
