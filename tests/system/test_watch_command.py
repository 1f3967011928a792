"""`argosy watch` as a user runs it: beside a real run, from a copy, with a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from commands import Folder
from ports import free_port
from run_folders import Made, Trouble, append
from waiting import PATIENT_S, wait_until

pytest.importorskip("starlette")

SHOWN = re.compile(r"is shown at (http://\S+)")
Watch = Callable[..., str]


@pytest.fixture
def watch(folder: Folder) -> Iterator[Watch]:
    """Start `argosy watch WORDS` and return the address that it prints; at the end, Ctrl-C must end it cleanly."""
    begun: list[subprocess.Popen[str]] = []

    def start(*words: object, **variables: str) -> str:
        process = folder.start("watch", *words, **variables)
        begun.append(process)
        assert process.stdout is not None
        found = SHOWN.search(process.stdout.readline())
        assert found is not None, process.communicate(timeout=PATIENT_S)
        return found[1]

    yield start
    for process in begun:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENT_S)
        assert (process.returncode, err) == (0, ""), out


def answer(address: str, path: str = "", **headers: str) -> Any:
    request = urllib.request.Request(address.partition("?")[0].rstrip("/") + path, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENT_S) as found:
        return json.load(found)


def test_a_real_run_is_watched_from_its_first_step_to_its_end(folder: Folder, watch: Watch) -> None:
    (folder.path / "runs").mkdir()
    address = watch()
    assert answer(address, "/api/runs") == []
    slow = "slow@forward:seconds=0.1"  # it is seen before its end
    run = folder.start("train", folder.write_run(steps=30, every_steps=10), ARGOSY_FAULTS=slow)
    try:
        growing = wait_until(lambda: [found for found in answer(address, "/api/runs") if (found["step"] or 0) > 5])
        assert (growing[0]["id"], growing[0]["state"], growing[0]["devices"]) == ("tiny", "training", 2)
        done = wait_until(lambda: [found for found in answer(address, "/api/runs") if found["state"] == "finished"])
    finally:
        run.communicate(timeout=PATIENT_S)
    assert run.returncode == 0
    assert done[0]["step"] == done[0]["steps"] == 30
    lines = [json.loads(line) for line in (folder.path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    series = answer(address, "/api/runs/tiny/series?keys=loss")
    assert series["keys"]["loss"]["mean"] == [line["loss"] for line in lines if "loss" in line]
    found = answer(address, "/api/runs/tiny/events")
    assert sum(found["goodput"]["parts"].values()) == pytest.approx(found["goodput"]["wall_s"], abs=0.1)
    assert {event["event"] for event in found["events"]} >= {"start", "save", "end", "finish"}
    times = answer(address, "/api/runs/tiny/time")
    assert times["predicted"] and times["words"]
    assert answer(address, "/api/runs/tiny")["problems"] == []


def test_a_copy_that_must_not_be_written_is_shown_and_stays_as_it_is(folder: Folder, watch: Watch) -> None:
    copy = Made(steps=30).write(folder.path / "copy")
    for path in (*copy.rglob("*"), copy):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    (run,) = answer(watch("copy"), "/api/runs")
    assert (run["id"], run["step"]) == ("copy", 30)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755)


def test_others_on_the_network_need_the_token_that_is_printed(folder: Folder, watch: Watch) -> None:
    Made(steps=3).write(folder.path / "runs" / "demo")
    address = watch("--host", "0.0.0.0")
    token = urllib.parse.parse_qs(urllib.parse.urlsplit(address).query)["token"][0]
    here = f"http://127.0.0.1:{urllib.parse.urlsplit(address).port}"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        answer(here, "/api/runs")
    assert len(answer(here, "/api/runs", Authorization=f"Bearer {token}")) == 1


def test_a_token_of_one_s_own_is_asked_for_on_this_machine_too(folder: Folder, watch: Watch) -> None:
    Made(steps=3).write(folder.path / "runs" / "demo")
    address = watch(ARGOSY_WATCH_TOKEN="my-own-and-long-token")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        answer(address, "/api/runs")
    assert len(answer(address, "/api/runs", Authorization="Bearer my-own-and-long-token")) == 1


def test_who_may_start_and_stop_runs_needs_a_token_on_this_machine_too(folder: Folder, watch: Watch) -> None:
    Made(steps=3).write(folder.path / "runs/tiny")
    address = watch("--mcp-http", "--allow", "stop")
    assert "token=" in address
    with pytest.raises(urllib.error.HTTPError, match="401"):
        answer(address.partition("?")[0], "/api/runs")


def test_a_port_that_is_taken_is_passed_over_unless_it_was_asked_for(folder: Folder, watch: Watch) -> None:
    Made(steps=3).write(folder.path / "runs" / "demo")
    ports = [urllib.parse.urlsplit(watch()).port for _ in range(2)]
    assert ports[0] != ports[1]
    text = folder.argosy_here("watch", "--port", ports[0], code=2)
    assert f"--port {ports[0]}: another program listens there" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "none: no such folder. Name a run's folder"),
        ([], "runs: no such folder. Train one with `argosy train`"),
        (["run.toml"], "run.toml: a file. Name the folder of a run"),
        ([".", "--port", "99999"], "--port 99999: a port is a number from 0 to 65535"),
        ([".", "--host", "no.such.host.invalid"], "--host no.such.host.invalid: no address of this machine"),
        ([".", "--host", "203.0.113.7"], "--host 203.0.113.7: no address of this machine"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_a_sentence(
    folder: Folder, refused: Callable[..., str], words: list[str], said: str
) -> None:
    folder.write_run()
    refused("watch", *words, said=(said,))


def test_a_token_that_is_guessed_easily_is_refused(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_WATCH_TOKEN", "secret")
    refused("watch", ".", said=("ARGOSY_WATCH_TOKEN", "openssl rand -hex 32"))


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_all_runs(folder: Folder, watch: Watch) -> None:
    made = Made(steps=20, total_steps=40, ranks=80, start_s=time.time() - 20, is_finished=False)
    growing = made.write(folder.path / "runs" / "team" / "growing")
    Made(steps=30, trouble=Trouble(killed=(1, 10))).write(folder.path / "runs" / "done")
    port = urllib.parse.urlsplit(watch(ARGOSY_WATCH_TOKEN="a-token-for-prometheus")).port
    web = free_port()
    config = folder.path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: argosy\n"
        "  authorization: {credentials: a-token-for-prometheus}\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
    )
    places = [f"--storage.tsdb.path={folder.path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{web}"]
    command = ["prometheus", f"--config.file={config}", *places]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))

    def asked(query: str) -> dict[str, float]:
        address = f"http://127.0.0.1:{web}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(address, timeout=5) as found:
                result = json.load(found)["data"]["result"]
        except OSError:
            return {}
        return {
            each["metric"].get("run", "") + each["metric"].get("statistic", ""): float(each["value"][1])
            for each in result
        }

    try:
        assert wait_until(lambda: asked("argosy_steps_done")) == {"done": 30, "team/growing": 20}
        append(growing / "metrics.jsonl", made.metric_line(20))
        wait_until(lambda: asked("argosy_steps_done")["team/growing"] == 21)
        assert asked('argosy_run_state{state="finished"} == 1') == {"done": 1}
        assert asked('argosy_events_total{event="worker_died"}') == {"done": 1}
        ranks = asked("argosy_rank_step_seconds")
        assert "team/growingmean" in ranks and "done" in ranks
    finally:
        server.kill()
        server.wait()
