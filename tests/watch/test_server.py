from __future__ import annotations

import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from argosy.observe import line_follower
from argosy.watch import library, linefile, metrics_table, timeline
from argosy.watch import server as server_module
from argosy.watch.nodes import EnergySoFar
from argosy.watch.reader import RunReader, RunTail
from argosy.watch.server import VIEWS
from argosy.watch.status import RunSummary
from run_folders import Made, Trouble, append
from watch.served import Served, served

TROUBLE = Trouble(straggler=(2, 100), spike=60, killed=(1, 150), nan=70)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all kinds."""
    root = tmp_path_factory.mktemp("runs")
    trouble = Made(steps=300, trouble=TROUBLE, user=("accuracy",), experts=4).write(root / "trouble")
    append(trouble / "logs" / "worker-0.log", b"old\nfetching https://me:secret@host/x\nlast line\n")
    summary = {"steps": [10, 13], "ranks": {"0": {"operations": [{"name": "mm", "seconds": 1.0, "share": 0.5}]}}}
    append(trouble / "profiles" / "step-10-13" / "summary.json", summary)
    append(trouble / "profiles" / "step-10-13" / "rank-0.json.gz", b"trace")
    Made(steps=0, is_finished=False).write(root / "team" / "new one")
    append(root / "old" / "metrics.jsonl", {"step": 0, "loss": 1.0, "seconds": {"forward": 1.0, "step": 1.0}})
    append(root / "empty" / "metrics.jsonl", b"")
    (root / "foreign").mkdir()
    append(root / "foreign" / "notes.txt", b"canary")
    append(root.parent / f"{root.name}-secret" / "metrics.jsonl", {"step": 0, "loss": 1.0, "user": {"canary": 1}})
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with served(root) as found:
        yield found


def test_a_list_of_runs_has_what_each_comes_to(server: Served) -> None:
    runs = {run["id"]: run for run in server.get("/api/runs").json()}
    assert list(runs) == ["empty", "old", "team/new one", "trouble"]
    trouble = runs["trouble"]
    assert (trouble["state"], trouble["step"], trouble["steps"], trouble["devices"]) == ("finished", 300, 300, 4)
    assert trouble["loss"] == pytest.approx(2.87, abs=0.05)
    assert trouble["validation_loss"] == pytest.approx(2.9, abs=0.05)
    assert trouble["eta_s"] is None
    assert trouble["plan"].startswith("dp_replicate=4")
    assert len(trouble["spark"]) > 30
    assert runs["empty"]["step"] is None


def test_the_cost_is_that_of_the_devices_for_the_time_that_they_were_held(server: Served) -> None:
    (run,) = (run for run in server.get("/api/runs").json() if run["id"] == "trouble")
    held_h = (run["updated_s"] - run["started_s"]) / 3600
    assert run["currency"] == "USD"
    assert 1 < run["cost"] / (4 * held_h) < 10  # dollars for an hour of an H100


def test_a_run_without_a_price_has_no_cost(server: Served) -> None:
    run = server.get("/api/runs/old").json()
    assert run["cost"] is None and run["currency"] is None


def test_the_end_of_a_run_that_trains_is_estimated_at_its_pace(tmp_path: Path) -> None:
    made = Made(steps=100, total_steps=300, step_s=0.5, start_s=time.time() - 61, is_finished=False)
    made.write(tmp_path / "demo")
    with served(tmp_path) as server:
        assert server.get("/api/runs").json()[0]["eta_s"] == pytest.approx(100, rel=0.05)
        assert server.get("/api/runs/demo").json()["eta_s"] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("view", ["", *(f"/{name}" for name in VIEWS)])
@pytest.mark.parametrize("run", ["trouble", "team/new%20one", "old", "empty"])
def test_every_view_of_every_run_is_json(server: Served, run: str, view: str) -> None:
    answer = server.get(f"/api/runs/{run}{view}")
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert b"NaN" not in answer.body
    answer.json()


def test_a_run_s_head_has_keys_goodput_and_config(server: Served) -> None:
    run = server.get("/api/runs/trouble").json()
    assert {"loss", "seconds.forward", "user.accuracy", "experts.0.imbalance", "norms.layers.0.weight"} <= set(
        run["keys"]
    )
    assert 0.5 < run["goodput"] < 1
    assert run["predicted"]["step_s"] == [0.3, 0.38, 0.5]
    assert run["config"]["train"]["steps"] == 300
    assert run["problems"] == []


def test_series_are_summed_up_on_the_server_and_lose_no_spike(server: Served) -> None:
    all_steps = server.get("/api/runs/trouble/series?keys=loss").json()
    assert all_steps["step"] == list(range(300))
    assert all_steps["bad"] == [70]
    assert all_steps["keys"]["loss"]["mean"][70] is None
    few = server.get("/api/runs/trouble/series?keys=loss,nonsense,norms.layers.0.weight&points=10").json()
    assert len(few["step"]) == 10
    assert list(few["keys"]) == ["loss"]
    losses = [loss for loss in all_steps["keys"]["loss"]["mean"] if loss is not None]
    assert max(few["keys"]["loss"]["max"]) == max(losses)
    assert min(few["keys"]["loss"]["min"]) == min(losses)
    assert few["norms"]["keys"]["norms.layers.0.weight"]["mean"] == [10.0] * 6
    part = server.get("/api/runs/trouble/series?keys=loss&from=100&to=109").json()
    assert part["step"] == list(range(100, 110))
    assert (part["first"], part["last"]) == (0, 299)


def test_the_parts_of_a_step_stand_beside_the_plan_s(server: Served) -> None:
    found = server.get("/api/runs/trouble/time?from=200&to=299").json()
    assert sum(parts[0] for parts in found["parts"].values()) == pytest.approx(found["step_s"][0], rel=1e-3)
    assert found["predicted"] == pytest.approx(
        {"forward_backward": 0.3, "communication": 0.04, "optimizer": 0.02, "rest": 0.02}
    )
    assert found["measured"]["communication"] == pytest.approx(0.24, rel=0.01)  # all wait for the straggler
    assert "communication that backward does not hide takes 0.24 s of a step" in found["words"]
    axes = {(entry["axis"], entry["tier"]): entry for entry in found["communication"]}
    assert axes["dp_replicate", "network"]["bytes"] == 39_120_000


def test_memory_of_all_ranks_stands_beside_the_prediction(server: Served) -> None:
    found = server.get("/api/runs/trouble/memory").json()
    assert found["measured"]["optimizer"] == found["predicted"]["optimizer"] == 2e8
    assert found["before"] == 1e8 and "before" not in found["measured"]
    assert found["measured_total"] == sum(found["measured"].values()), "without what was there before the model"
    assert found["by_rank"]["ranks"] == [0, 1, 2, 3]
    assert found["by_rank"]["bytes"][3] == 900_000_003
    assert found["by_rank"]["limit_bytes"][0] > 7e10


def test_the_map_of_ranks_shows_the_straggler_and_the_death(server: Served) -> None:
    found = server.get("/api/runs/trouble/ranks").json()
    assert found["ranks"] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert found["nodes"] == ["node-0", "node-0", "node-1", "node-1"]
    assert found["complete"]
    late = [row[200] for row in found["values"]]
    assert late[2] > 1.8 * max(late[0], late[1], late[3])
    assert [(mark["rank"], mark["node"]) for mark in found["stragglers"]] == [(2, "node-1")]
    assert [(mark["rank"], mark["step"]) for mark in found["deaths"]] == [(1, 150)]
    few = server.get("/api/runs/trouble/ranks?rows=2&points=5&key=step_s&from=100&to=199").json()
    assert few["ranks"] == [[0, 1], [2, 3]] and len(few["values"][0]) == 5
    assert few["step"][0] == 100
    one = server.get("/api/runs/trouble/ranks?rank_from=2&rank_to=2").json()
    assert one["ranks"] == [[2, 2]]


def test_a_minute_of_which_only_a_part_is_known_is_no_ramp_of_the_power(tmp_path: Path) -> None:
    reader = RunReader.read(Made(steps=400).write(tmp_path / "demo"))
    meter = EnergySoFar(reader.folder)
    meter.refresh(reader.nodes)
    power = meter.series()["power_w"]
    assert len(power) > 2 and power == pytest.approx([2000.0] * len(power), rel=0.02)  # four devices of 500 W


def test_an_event_s_words_do_not_say_step_twice() -> None:
    told = {"event": "bad_step", "time_s": 1.0, "step": 1865, "outcome": "skip"}
    assert timeline.words(told) == "bad step 1865: skip"
    assert timeline.words({**told, "event": "save"}) == "save after 1865 steps: skip"


def test_wall_time_is_split_without_a_rest_and_faults_have_a_cost(server: Served) -> None:
    found = server.get("/api/runs/trouble/events").json()
    goodput = found["goodput"]
    assert sum(goodput["parts"].values()) == pytest.approx(goodput["wall_s"], abs=0.1)
    assert goodput["parts"]["recovery"] == pytest.approx(10.35, abs=0.1)
    (broken,) = (event for event in found["events"] if event["event"] == "break")
    assert broken["cost_s"] == pytest.approx(10.35 + 2 * 0.6, abs=0.2)
    assert "SIGKILL" in broken["words"] and "worker died rank 1" in broken["cause"]
    assert [stretch["phase"] for stretch in found["phases"][:4]] == ["startup", "training", "recovery", "training"]
    deaths = server.get("/api/runs/trouble/events?kinds=worker_died,break").json()["events"]
    assert {event["event"] for event in deaths} == {"worker_died", "break"}


def test_model_energy_profiles_and_logs_are_shown(server: Served) -> None:
    model = server.get("/api/runs/trouble/model").json()
    assert model["norms"]["layers"] == [f"layers.{n}" for n in range(4)]
    assert len(model["norms"]["gradient"][0]) == len(model["norms"]["step"]) == 6
    assert len(model["experts"]["load"][0]) == 4
    assert model["samples"][-1]["step"] == 299
    energy = server.get("/api/runs/trouble/energy").json()
    assert energy["kwh"] == 0.02 and len(energy["series"]["power_w"]) > 1
    (profile,) = server.get("/api/runs/trouble/profiles").json()
    assert profile["ranks"]["0"]["operations"][0]["name"] == "mm"
    assert {file["name"] for file in profile["files"]} == {"summary.json", "rank-0.json.gz"}
    trace = server.get("/api/runs/trouble/profiles/step-10-13/rank-0.json.gz")
    assert trace.body == b"trace" and "attachment" in trace.headers["content-disposition"]
    lines = server.get("/api/runs/trouble/log").json()["lines"]
    assert lines[-1] == {"process": "worker-0", "text": "last line"}
    assert "secret" not in json.dumps(lines)


def test_advice_names_the_straggler(server: Served) -> None:
    found = server.get("/api/runs/trouble/advice").json()
    assert any("Rank 2" in advice["title"] for advice in found["advice"])


def test_a_status_says_what_is_next_as_advice_does(server: Served) -> None:
    status = server.get("/api/runs/trouble/status").json()
    assert RunSummary.model_validate(status).next.model_dump() == server.get("/api/runs/trouble/advice").json()["next"]
    assert server.get("/api/runs/trouble/status?since=nonsense").status == 404


@pytest.mark.parametrize(
    "query", ["from=x", "to=nan", "points=0", "points=-5", "from=1e400", "points=two", "to=" + "9" * 400]
)
def test_a_wrong_parameter_is_named(server: Served, query: str) -> None:
    answer = server.get(f"/api/runs/trouble/series?{query}")
    assert answer.status == 400
    assert query.partition("=")[0] in answer.json()["error"]


def test_what_is_asked_for_is_bounded(server: Served) -> None:
    assert server.get("/api/runs/trouble/series?points=1000000000").status == 200
    assert server.get("/api/runs/trouble/ranks?rows=99999999&points=99999999&rank_to=1e15").status == 200
    assert server.get("/api/runs/trouble/series?keys=" + ",".join(["loss"] * 2000)).status == 200


PLACES = [
    "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "%252e%252e%252fetc%252fpasswd",
    "....//....//etc/passwd", "..\\..\\etc\\passwd", "..%5c..%5cetc%5cpasswd", "%c0%ae%c0%ae/etc/passwd",
    "/etc/passwd", "%2fetc%2fpasswd", "~", "%ff%fe", "trouble/../../SECRET", "trouble%2f..%2f..%2fSECRET", "trouble%00",
    "..;/etc/passwd", "foreign", "foreign/notes.txt", "trouble/metrics.jsonl", ".", "..", "%2e", "file:///etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("before", ["/api/runs/", "/static/", "/", "/api/runs/trouble/profiles/"])
def test_no_path_leads_out_of_the_folder(server: Served, root: Path, before: str, place: str) -> None:
    path = before + place.replace("SECRET", f"{root.name}-secret")
    for end in ("", "/series?keys=user.canary", "/log"):
        answer = server.get(path + end)
        assert answer.status in (400, 403, 404, 405) or (answer.status == 200 and b"canary" not in answer.body)
        assert b"root:" not in answer.body
        assert b'"canary"' not in answer.body


def test_a_run_that_is_linked_to_from_the_folder_is_not_shown(root: Path, server: Served, tmp_path: Path) -> None:
    (root / "link").symlink_to(Made(steps=3).write(tmp_path / "elsewhere"))
    try:
        assert server.get("/api/runs/link").status == 404
    finally:
        (root / "link").unlink()


def test_nothing_is_written_or_changed_by_any_method(server: Served) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert server.get("/api/runs", method).status == 405


def test_news_come_when_a_run_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LIVE_NEWS_S", 0.1)
    monkeypatch.setattr(library, "REREAD_S", 0.05)
    made = Made(steps=5, total_steps=50, start_s=time.time() - 12, is_finished=False)
    folder = made.write(tmp_path / "demo")
    with served(tmp_path) as server:
        news = server.live()
        assert next(news) == {"id": "demo", "step": 4, "state": "training"}
        append(folder / "metrics.jsonl", made.metric_line(5))
        assert next(news)["step"] == 5
        append(folder / "events" / "coordinator.jsonl", {"time_s": time.time(), "event": "finish", "exit_code": 1})
        assert next(news)["state"] == "failed"


def test_a_run_that_takes_long_to_open_holds_no_other_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    real = metrics_table.MetricsTable.refresh

    def slow(self: metrics_table.MetricsTable) -> bool:
        if "slow" in str(self._file.path):
            started.set()
            go_on.wait(20)
        return real(self)

    monkeypatch.setattr(metrics_table.MetricsTable, "refresh", slow)
    for name in ("slow", "quick"):
        Made(steps=5).write(tmp_path / name)
    with served(tmp_path) as server, ThreadPoolExecutor() as threads:
        waiting = threads.submit(server.get, "/api/runs/slow")
        assert started.wait(20)
        assert server.get("/api/runs/quick").status == 200
        assert len(server.get("/api/runs").json()) == 2
        assert next(server.live())["id"] in ("slow", "quick")
        go_on.set()
        assert waiting.result(20).status == 200


@pytest.mark.slow
def test_a_hundred_runs_at_once_are_answered_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(100):
        Made(steps=20, ranks=1, save_every=20).write(tmp_path / f"run-{n:03}")
    monkeypatch.setattr(library, "MOST_OPEN", 10)
    gc.collect()
    before = sum(isinstance(each, RunReader) for each in gc.get_objects())
    with served(tmp_path) as server, ThreadPoolExecutor(50) as threads:
        assert len(server.get("/api/runs").json()) == 100
        answers = list(threads.map(lambda n: server.get(f"/api/runs/run-{n:03}/series?keys=loss"), range(100)))
        assert [answer.status for answer in answers] == [200] * 100
        assert all(len(answer.json()["step"]) == 20 for answer in answers)
        server.get("/api/runs/run-000")
        gc.collect()
        assert sum(isinstance(each, RunReader) for each in gc.get_objects()) - before <= 10


def test_a_long_run_is_read_by_groups_and_its_numbers_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_table, "TABLE_READ_WHOLE_BYTES", 0)
    monkeypatch.setattr(line_follower, "LINE_READ_BYTES", 50_000)
    long = Made(steps=300).write(tmp_path / "long")
    append(long / "metrics.jsonl", {"step": 299, "validation_loss": 0.5, "validation_accuracy": 0.75})
    with served(tmp_path) as server:
        assert server.get("/api/runs/long/evaluations").json()["accuracy"][-1] == 0.75
        found = server.get("/api/runs/long/series?keys=loss,seconds.forward").json()
        assert None not in found["keys"]["seconds.forward"]["mean"]
        assert "communication.world.network.0" in server.get("/api/runs/long").json()["keys"]


def test_prometheus_is_told_of_all_runs(server: Served) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'argosy_steps_done{run="trouble"} 300' in answer.body.decode()
    assert 'run="team/new one"' in answer.body.decode()


def test_prometheus_counter_of_events_never_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linefile, "MOST_HELD_EVENTS", 3)
    tail = RunTail(Made(steps=20, ranks=2).write(tmp_path / "demo"))
    tail.refresh()
    before = server_module.latest("demo", tail).events
    append(tail.folder / "events/coordinator.jsonl", *({"time_s": 4e9 + n, "event": "break"} for n in range(5)))
    tail.refresh()
    assert server_module.latest("demo", tail).events == before + Counter({"break": 5})
