"""A run that is shown elsewhere: it trains as if it were not, whatever becomes of what shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import run_folder
from commands import Folder
from ports import free_port
from waiting import PATIENT_S, wait_until

events = partial(run_folder.events, process="*")
BAD = str(Path(__file__).parent.parent / "sinks")


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def in_tensorboard(run_dir: Path) -> list[tuple[int, float]]:
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("train/loss")]


def children_of(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def follower_of(agent: int) -> int | None:
    for pid in children_of(agent):
        if b"argosy.sinks.follower" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


@pytest.fixture
def started(folder: Folder) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Commands that are killed if the test ends before them."""
    begun: list[subprocess.Popen[str]] = []

    def start(*words: object, **variables: str) -> subprocess.Popen[str]:
        begun.append(folder.start("train", *words, **variables))
        return begun[-1]

    yield start
    for process in begun:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_losses_are_the_same_to_a_bit_beside_bad_sinks_a_killed_follower_norms_and_samples(folder, started):
    run_file = folder.write_run(steps=60, every_steps=30)
    folder.argosy("train", run_file, "--run-dir", "alone", "--observe.norms-every-steps", "0")
    path = os.pathsep.join([BAD, os.environ["PYTHONPATH"]])
    sinks = ["tensorboard", "bad_sinks:RaisesAtStart", "raises_at_import:Sink", "bad_sinks:Hangs"]
    words = [run_file, "--run-dir", "shown", "--observe.sinks", *sinks, "--observe.sink.flush-s", "4"]
    words += ["--observe.norms-every-steps", "5"]
    words += ["--observe.sample-every-steps", "20", "--evaluate.sample-prompt", "class "]
    process = started(*words, PYTHONPATH=path)
    shown = folder.path / "shown"
    wait_until(lambda: (shown / "metrics.jsonl").exists() and follower_of(process.pid) is not None)
    wait_until(lambda: bool(events(shown, "sink_started")))
    killed = follower_of(process.pid)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: follower_of(process.pid) not in (None, killed))
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 0, err
    assert losses(shown) == losses(folder.path / "alone")
    assert sum("norms" in line for line in map(json.loads, (shown / "metrics.jsonl").open())) == 12
    samples = [json.loads(line) for line in (shown / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["step"] == 59
    assert all(sample["prompt"] == "class " and sample["text"] for sample in samples)
    assert in_tensorboard(shown) == [(step, pytest.approx(loss)) for step, loss in losses(shown)]
    assert "the sink bad_sinks:RaisesAtStart is switched off: RuntimeError: no server at http://***@example.org" in err
    assert "the sink raises_at_import:Sink is switched off: ImportError: a library of it is missing" in err
    assert "the sink bad_sinks:Hangs is switched off: it did not finish within 4 s" in err
    assert "the process that holds the run's sinks died: signal SIGKILL; it is started again" in err
    assert [event["why"] for event in events(shown, "follower_died")] == ["signal SIGKILL"]
    wait_until(lambda: not _left_behind(shown))


def _left_behind(run_dir: Path) -> list[str]:
    """Processes of the run's sinks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode()
        except OSError:
            continue
        if "argosy.sinks" in text and str(run_dir) in text:
            found.append(text)
    return found


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on_is_one_curve(folder):
    run_file = folder.write_run(steps=6, every_steps=2)
    sinks = ["--observe.sinks", "tensorboard"]
    folder.argosy("train", run_file, *sinks, "--train.pause-at", "4")
    folder.argosy("train", run_file, *sinks)
    run_dir = folder.path / "runs/tiny"
    assert in_tensorboard(run_dir) == [(step, pytest.approx(loss)) for step, loss in losses(run_dir)]
    assert [step for step, _ in in_tensorboard(run_dir)] == list(range(6))
    assert len(list((run_dir / "tensorboard").glob("events.out.*"))) == 2


@pytest.mark.slow
def test_steps_that_a_killed_run_lost_are_one_curve_when_it_goes_on(folder, started):
    run_file, run_dir = folder.write_run(steps=3000, every_steps=60), folder.path / "runs/tiny"
    process = started(run_file, "--observe.sinks", "tensorboard")
    wait_until(
        lambda: bool(events(run_dir, "verified")) and (run_dir / "metrics.jsonl").read_text().count("\n") % 60 > 30
    )
    wait_until(lambda: len(in_tensorboard(run_dir)) > 60)
    process.kill()
    process.communicate()
    wait_until(lambda: not _left_behind(run_dir))
    told = in_tensorboard(run_dir)[-1][0]
    last = events(run_dir, "verified")[-1]["step"]
    folder.argosy("train", run_file, "--observe.sinks", "tensorboard", "--train.steps", told + 5)
    assert events(run_dir, "resume")[-1]["step"] <= last + 60
    assert in_tensorboard(run_dir) == [(step, pytest.approx(loss)) for step, loss in losses(run_dir)]
    assert [step for step, _ in in_tensorboard(run_dir)] == list(range(told + 5))


@pytest.mark.slow
def test_a_run_in_processes_of_torchrun_is_shown_too(folder):
    run_file, run_dir = folder.write_run(steps=6, every_steps=6), folder.path / "runs/tiny"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "argosy", "train"]
    command = [*torchrun, str(run_file), "--observe.sinks", "tensorboard"]
    done = subprocess.run(command, cwd=folder.path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert in_tensorboard(run_dir) == [(step, pytest.approx(loss)) for step, loss in losses(run_dir)]
    assert len(losses(run_dir)) == 6
    wait_until(lambda: not _left_behind(run_dir))
    refused = [*torchrun, str(run_file), "--run-dir", "other", "--observe.sinks", "tensorbord"]
    done = subprocess.run(refused, cwd=folder.path, capture_output=True, text=True, check=False)
    assert "did you mean 'tensorboard'?" in done.stderr
    assert not (folder.path / "other").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--observe.sinks", "tensorbord"], "did you mean 'tensorboard'?"),
        (["--observe.sinks", "prometheus", "--observe.prometheus.host", "0.0.0.0"], "ARGOSY_METRICS_TOKEN"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(folder, refused, options, said):
    refused("train", folder.write_run(), *options, said=(said,))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_a_run(folder, started, tmp_path):
    port, web = free_port(), free_port()
    run_file = folder.write_run(steps=5000, every_steps=0)
    run = started(run_file, "--observe.sinks", "prometheus", "--observe.prometheus.port", port)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n"
        f"- {{job_name: argosy, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
    )
    words = [
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{web}",
    ]
    server = subprocess.Popen(["prometheus", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def asked(query: str) -> list[dict[str, Any]]:
        address = f"http://127.0.0.1:{web}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code in (400, 422):  # it cannot parse or execute the query
                raise AssertionError(f"{query}: {error.read().decode()}") from None
            return []  # it is starting
        except OSError:
            return []

    try:
        wait_until(lambda: any(float(found["value"][1]) > 3 for found in asked('argosy_steps_done{run="tiny"}')))
        assert float(asked("argosy_loss")[0]["value"][1]) > 0
        assert asked("up")[0]["value"][1] == "1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            said = set(re.findall("^argosy_[a-z_]+", answer.read().decode(), re.MULTILINE))
        for panel in json.loads(files("argosy.sinks").joinpath("grafana.json").read_text())["panels"]:
            for target in panel["targets"]:  # a query that Prometheus cannot parse is an HTTP error
                query = target["expr"].replace("$run", ".*")
                asked(query)
                if set(re.findall("argosy_[a-z_]+", query)) <= said and "recovered" not in query:
                    wait_until(partial(asked, query), 20)  # a rate needs two scrapes
    finally:
        server.kill()
        server.wait()
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=PATIENT_S)
