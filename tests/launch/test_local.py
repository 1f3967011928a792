"""A run on this machine, in real processes: what becomes of it when they die."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from socket import create_server
from threading import Thread
from typing import Any

import pytest

from argosy.checkpoint import store
from argosy.config.schema import RunConfig
from argosy.errors import Retryable, RunFailed, UserError
from argosy.launch import run_folder
from argosy.launch.local import fork_server, train, would_train
from argosy.observe.events import Metrics
from argosy.observe.report import Report
from argosy.observe.surfaces import RunDisplay
from argosy.parallel.world import World
from argosy.supervise.agent import Agent
from run_folder import events as events_of
from tiny import EAGER, losses, run_config, train_in
from waiting import is_alive, wait_until

events = partial(events_of, process="launcher")
ENDLESS = {"train": {"steps": 1_000_000}, "evaluate": {"every_steps": 0}}


def launch(run: RunConfig, corpus: Path, run_dir: Path, **settings: Any) -> None:
    """Train `run` in a process of its own, until it is done."""
    run_dir.mkdir(exist_ok=True)
    run = run.model_copy(update={"launch": run.launch.model_copy(update=settings)})
    run_folder.write(run_dir, run, EAGER, [corpus])
    with fork_server(RunDisplay()) as forks:
        Agent(run_dir, run, EAGER, forks).run()


def steps_done(run_dir: Path) -> int:
    return len(losses(Metrics(run_dir).read()))


@contextmanager
def the_worker_killed_after(steps: int, run_dir: Path) -> Iterator[None]:
    """Meanwhile, kill the first worker once `steps` are done."""

    def kill() -> None:
        wait_until(lambda: steps_done(run_dir) >= steps)
        os.kill(events(run_dir, "worker_started")[0]["pid"], signal.SIGKILL)

    killer = Thread(target=kill, daemon=True)
    killer.start()
    yield
    killer.join()


def test_a_dry_run_refuses_the_data_that_training_would(tmp_path):
    for sources, words in ({str(tmp_path / "no"): 1.0}, "no prepared data here"), ({}, "there is no data to train on"):
        with pytest.raises(UserError, match=words):
            would_train(run_config(tmp_path, data={"sources": sources}), tmp_path / "run", str)


def test_a_profile_of_steps_that_the_run_lacks_is_refused_before_data_are_read(tmp_path):
    with pytest.raises(UserError, match=r"observe\.profile\.steps = 4:9 ends with step 8"):
        would_train(run_config(tmp_path, train={"steps": 6}, observe={"profile": {"steps": "4:9"}}), tmp_path, str)


def test_a_certificate_that_cannot_be_is_refused_before_data_are_read(tmp_path, monkeypatch):
    given = {"tls": True, "tls_certificate": "no.pem", "tls_key": "no.pem"}
    with pytest.raises(UserError, match=r"launch\.tls_certificate = no\.pem"):
        would_train(run_config(tmp_path, launch=given), tmp_path / "run", str)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ec", None)
    with pytest.raises(UserError, match=r"argosy\[tls\]"):
        would_train(run_config(tmp_path, launch={"tls": True}), tmp_path / "run", str)


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_loss(corpus, tmp_path):
    run = run_config(corpus, train={"steps": 40}, checkpoint={"every_steps": 3}, launch={"threads": 1})
    undisturbed = losses(train_in(World(), run, EAGER, tmp_path / "undisturbed"))
    disturbed = tmp_path / "disturbed"
    with the_worker_killed_after(5, disturbed):
        launch(run, corpus, disturbed)
    assert [event["why"] for event in events(disturbed, "worker_died")] == ["signal SIGKILL"]
    assert losses(Metrics(disturbed).read()) == undisturbed
    assert Report.load(disturbed).steps == 40


@pytest.mark.slow
def test_workers_that_keep_dying_end_the_run_with_how_to_go_on(corpus, tmp_path):
    with (
        the_worker_killed_after(3, tmp_path),
        pytest.raises(
            Retryable, match=r"died 1 times \(launch\.max_restarts = 0\) without making progress.*The same command"
        ),
    ):
        launch(run_config(corpus, **ENDLESS), corpus, tmp_path, max_restarts=0)


def test_an_error_that_a_restart_would_only_meet_again_is_raised_here(corpus, tmp_path, own_handlers):
    run = run_config(corpus, optimizer={"lr": 1e30, "grad_clip": 0.0})
    with pytest.raises(RunFailed, match=r"the last 5 steps were not finite.*Try a smaller optimizer\.lr"):
        launch(run, corpus, tmp_path)
    assert len(events(tmp_path, "worker_started")) == 1
    for number, handler in own_handlers.items():
        assert signal.getsignal(number) is handler, "a run leaves the signals of its caller alone"


@pytest.fixture
def own_handlers() -> Iterator[dict[signal.Signals, Callable[..., None]]]:
    """What this process does on some signals."""

    def handler(number: int, frame: object) -> None:
        raise AssertionError("no signal was sent")

    taken = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in taken}
    yield dict.fromkeys(taken, handler)
    for number, previous in before.items():
        signal.signal(number, previous)


@pytest.mark.parametrize(
    "begun", [pytest.param(False, marks=pytest.mark.slow), True], ids=["while they start", "while they train"]
)
def test_workers_do_not_outlive_their_launcher(corpus, tmp_path, begun):
    run = run_config(corpus, **ENDLESS)
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(run, corpus, tmp_path))
    launcher.start()
    try:
        wait_until(lambda: bool(events(tmp_path, "worker_started")))
        pid = events(tmp_path, "worker_started")[0]["pid"]
        wait_until(lambda: steps_done(tmp_path) > 0 or not begun)
        assert is_alive(pid)
    finally:
        launcher.kill()
        launcher.join()
    wait_until(lambda: not is_alive(pid))  # they would train for ever


def test_the_path_of_a_run_file_in_place_of_a_run_is_refused_with_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"takes a RunConfig, not 'run\.toml'. Try train\(argosy\.load\('run\.toml'\)\)"
    ):
        train("run.toml")
    assert not list(tmp_path.iterdir())


def test_a_caller_sees_what_is_printed_and_each_step_and_may_end_the_run(corpus, tmp_path):
    run, out, told = run_config(corpus, **ENDLESS, launch={"device": "cpu"}), io.StringIO(), []
    run = run.model_copy(update={"plan": "dp_replicate=1,precision=fp32,compile=false"})

    def watch(record: dict[str, Any]) -> None:
        told.append(record["step"])
        if len(told) == 5:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"), redirect_stdout(out):
        train(run, tmp_path / "run", on_step=watch)
    assert told == sorted(told) and len(told) == 5
    assert "argosy train" in out.getvalue() and "loss" in out.getvalue()
    assert store.committed(tmp_path / "run"), "its state is saved"


def test_a_port_in_use_is_refused_before_any_worker_starts(corpus, tmp_path):
    with create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"launch\.port = {port} is in use .* Try launch\.port = 0"):
            launch(run_config(corpus), corpus, tmp_path, port=port)
    assert not events(tmp_path, "worker_started") and not store.committed(tmp_path)
