"""Alerts begin, go on and end, each said once, and do not flap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from argosy.config.observe import ALERT_KINDS, AlertKind, AlertsConfig
from argosy.resilience import detect
from argosy.watch.alerts import CALM_S, CHECKS, FINDINGS, Alert, Alerts, standing
from argosy.watch.facts import DiskSeen, RunFacts
from watched import BEGAN_S, STEPS, columns, continued, event, healthy, small_run

BAD = {"step": STEPS - 10, "loss": 9.5, "grad_norm": 3.0, "largest_loss": 4.0, "outcome": "skip"}
NOW_S = float(columns()["time_s"][-1]) - BEGAN_S


def at(facts: RunFacts, after_s: float) -> RunFacts:
    """The same facts, looked at later."""
    return replace(facts, now_s=facts.now_s + after_s)


def states(alerts: list[Alert]) -> list[tuple[str, str]]:
    return [(alert.alert, alert.state) for alert in alerts]


def with_nan() -> dict[str, Any]:
    steps = columns()
    steps["loss"][-5] = np.nan
    return steps


def disk(free_gb: float, lost_gb: float = 0.0) -> tuple[DiskSeen, ...]:
    """A disk over half an hour, in which so much was written."""
    time_s = BEGAN_S + np.linspace(0, 1800, 31)
    return (DiskSeen("node3", time_s, 1e9 * np.linspace(free_gb + lost_gb, free_gb, 31)),)


def finding(kind: str, **facts: Any) -> Any:
    return event(kind, NOW_S - 5, "coordinator", why="rank 1 takes 2.0 times as long", ranks=[1], evidence={}, **facts)


VERIFIED = [event("verified", NOW_S - 60, step=300, seconds=1.0)]
WRONG: dict[AlertKind, tuple[Callable[[], RunFacts], str]] = {
    "spike": (
        lambda: healthy(events=[event("bad_step", NOW_S, reason="loss_spike", **BAD)]), "step 390 spiked: loss 9.5"),
    "nan": (lambda: healthy(steps=with_nan()), "step 395 was not finite"),
    "stall": (lambda: at(healthy(), 90.0), "no step has ended for"),
    "dead": (lambda: healthy(state="failed", events=[event("finish", NOW_S, exit_code=1, why="no room")]), "no room"),
    "disk_filling": (lambda: healthy(disks=disk(20, lost_gb=10)), "20.0 GB are free on the disk of node3"),
    "node_in_doubt": (lambda: healthy(events=[finding("straggler")]), "rank 1 takes 2.0 times"),
    "low_goodput": (lambda: at(healthy(), 3600.0), "of the last 30 minutes"),
    "checkpoint_unverified": (
        lambda: at(healthy(small_run(checkpoint={"every_minutes": 10.0}), events=VERIFIED), 3600.0), "was found whole"),
}  # fmt: skip
RIGHT: dict[AlertKind, Callable[[], RunFacts]] = {
    "spike": lambda: healthy(events=[event("bad_step", NOW_S, reason="loss_spike", **{**BAD, "step": 200})]),
    "nan": lambda: healthy(events=[event("bad_step", NOW_S, reason="not_finite", **{**BAD, "step": 200})]),
    "stall": lambda: at(healthy(), 40.0),
    "dead": lambda: healthy(state="stopped"),
    "disk_filling": lambda: healthy(disks=disk(50, lost_gb=5)),
    "node_in_doubt": lambda: healthy(events=[finding("straggler"), event("generation", NOW_S, ranks={})]),
    "low_goodput": lambda: at(healthy(steps=columns(8000)), 10.0),
    "checkpoint_unverified": lambda: healthy(small_run(checkpoint={"every_minutes": 10.0}), events=VERIFIED),
}


@pytest.mark.parametrize("alert", ALERT_KINDS)
def test_an_alert_begins_with_its_evidence_and_says_what_to_do(alert: AlertKind):
    make, expected = WRONG[alert]
    (found,) = Alerts(AlertsConfig(on=(alert,))).look(make())
    assert (found.alert, found.state) == (alert, "begins")
    assert expected in found.why and found.do
    json.dumps(found.record(), allow_nan=False)


@pytest.mark.parametrize("alert", ALERT_KINDS)
def test_a_run_in_which_all_is_well_again_has_no_alert(alert: AlertKind):
    assert Alerts(AlertsConfig(on=(alert,))).look(RIGHT[alert]()) == []


def test_a_healthy_run_has_no_alert():
    assert Alerts(AlertsConfig()).look(healthy()) == []
    assert Alerts(AlertsConfig()).look(RunFacts(now_s=0.0)) == []
    assert CHECKS.keys() == set(ALERT_KINDS) == WRONG.keys() == RIGHT.keys()


@pytest.mark.parametrize("alert", ALERT_KINDS)
def test_each_of_begins_goes_on_and_ends_is_said_once(alert: AlertKind):
    alerts = Alerts(AlertsConfig(on=(alert,), goes_on_minutes=1.0))
    wrong, right = WRONG[alert][0](), RIGHT[alert]()
    said = [*alerts.look(wrong), *alerts.look(wrong)]
    for after_s in (61.0, 70.0):  # what is wrong stays so however late one looks, but for events that grow old
        said += alerts.look(at(wrong, after_s))
    base_s = wrong.now_s + 100
    for after_s in (0.0, CALM_S / 2, CALM_S + 1, CALM_S + 20):
        said += alerts.look(fresh(alert, right, base_s + after_s))
    assert states(said) == [(alert, "begins"), (alert, "goes_on"), (alert, "ends")]
    assert said[2].since_s == said[0].time_s


def fresh(alert: AlertKind, facts: RunFacts, now_s: float) -> RunFacts:
    """The facts at a later time, with what must be new for the alert to stay away."""
    if alert == "stall":
        return later_step(facts, now_s)
    verified = [event("verified", now_s - BEGAN_S - 60, step=300, seconds=1.0)]
    return replace(facts, now_s=now_s, events=[*facts.events, *verified])


def later_step(facts: RunFacts, now_s: float) -> RunFacts:
    """The same run, which has just made a step."""
    steps = columns()
    steps["time_s"] += now_s - steps["time_s"][-1] - 1.0
    return replace(facts, steps=steps, now_s=now_s)


@pytest.mark.parametrize("alert", ["stall", "low_goodput", "checkpoint_unverified"])
def test_an_alert_about_how_a_run_trains_ends_with_the_run(alert: AlertKind):
    alerts, facts = Alerts(AlertsConfig(on=(alert,))), WRONG[alert][0]()
    assert states(alerts.look(facts)) == [(alert, "begins")]
    assert states(alerts.look(replace(facts, state="finished"))) == [(alert, "ends")]


def test_an_alert_does_not_flap_while_it_comes_and_goes():
    alerts = Alerts(AlertsConfig(on=("stall",)))
    stalled, said = WRONG["stall"][0](), []
    for number in range(6):
        now_s = stalled.now_s + 200 + 20 * number
        said += alerts.look(replace(stalled, now_s=now_s) if number % 2 == 0 else later_step(stalled, now_s))
    assert states(said) == [("stall", "begins")]


@pytest.mark.parametrize("wrong", [{"alert": ["dead"]}, {"severity": -1.0}, {"why": None}, {"since_s": "long"}])
def test_an_alert_of_another_form_is_none_of_ours(wrong: dict[str, Any]) -> None:
    told = {"alert": "dead", "state": "begins", "severity": "critical", "why": "gone", "do": "", "run": "tiny"}
    ours = event("alert", NOW_S, since_s=NOW_S, **told)
    assert states(standing(healthy(events=[ours]))) == [("dead", "begins")]
    assert standing(healthy(events=[{**ours, **wrong}])) == []


def test_a_bad_step_that_says_neither_loss_nor_norm_is_told() -> None:
    facts = healthy(events=[event("bad_step", NOW_S, reason="loss_spike", step=STEPS - 10)])
    (alert,) = Alerts(AlertsConfig(on=("spike",))).look(facts)
    assert "step 390 spiked: loss None, gradient norm None" in alert.why


@pytest.mark.parametrize("process", ["launcher", "launcher-node2"])
def test_a_full_disk_that_no_line_tells_of_ends_with_its_finding(process: str) -> None:
    full = event("disk_full", NOW_S - 5, process, why="3 MiB are left on its disk")
    facts = healthy(events=[full], disks=disk(50))
    alerts = Alerts(AlertsConfig(on=("disk_filling",)))
    said = [alert for after_s in (0.0, 300.0, 700.0, 700.0 + CALM_S) for alert in alerts.look(at(facts, after_s))]
    assert states(said) == [("disk_filling", "begins"), ("disk_filling", "ends")]


def test_the_alert_of_a_disk_ends_when_its_node_has_left_the_run() -> None:
    alerts = Alerts(AlertsConfig(on=("disk_filling",)))
    said = alerts.look(healthy(disks=disk(1)))
    gone = healthy(events=[event("alert", NOW_S, "alerts", **{**said[0].record(), "time_s": BEGAN_S + NOW_S})])
    said += [alert for after_s in (3600.0, 3600.0 + CALM_S) for alert in alerts.look(at(gone, after_s))]
    assert states(said) == [("disk_filling", "begins"), ("disk_filling", "ends")]
    assert {alert.subject for alert in said} == {"node3"}


def test_between_two_limits_an_alert_stays_as_it_is():
    alerts = Alerts(AlertsConfig(on=("disk_filling",), disk_free_gb=5.0))
    said = []
    for number, free_gb in enumerate((6.0, 4.9, 5.1, 6.0, 4.9, 8.0, 8.0)):
        said += alerts.look(at(healthy(disks=disk(free_gb)), 100.0 * number))
    assert states(said) == [("disk_filling", "begins"), ("disk_filling", "ends")]


@pytest.mark.parametrize("alert", ["low_goodput", "stall", "checkpoint_unverified"])
def test_a_run_that_was_stopped_for_a_day_and_continued_has_no_alert(alert: AlertKind):
    facts = continued(healthy(small_run(checkpoint={"every_minutes": 10.0}), steps=columns(8000)), 86_400.0, 7990)
    assert Alerts(AlertsConfig(on=(alert,))).look(at(facts, 10.0)) == []


@pytest.mark.parametrize("into_the_step_s", [1.0, 1800.0, 3500.0])
def test_steps_that_are_longer_than_the_window_are_no_low_goodput(into_the_step_s: float) -> None:
    facts = healthy(steps=columns(60, step_s=3600.0))
    assert Alerts(AlertsConfig(on=("low_goodput",))).look(at(facts, into_the_step_s)) == []


def test_a_worker_of_parameter_servers_has_no_checkpoints_to_verify() -> None:
    run = small_run(checkpoint={"every_minutes": 10.0})
    facts = at(healthy(run, "sync=async,microbatch=4,compile=false"), 7200.0)
    assert Alerts(AlertsConfig(on=("checkpoint_unverified",))).look(facts) == []


def test_a_run_that_hangs_after_a_pause_is_said_to_stall():
    facts = continued(healthy(), 86_400.0, STEPS - 10)
    assert states(Alerts(AlertsConfig(on=("stall",))).look(at(facts, 900.0))) == [("stall", "begins")]


def test_the_first_step_after_a_pause_may_compile():
    facts = continued(healthy(), 86_400.0)
    first = {key: values[:-1] for key, values in facts.steps.items()}  # type: ignore[attr-defined]
    facts = replace(facts, steps=first, now_s=facts.starts[-1]["time_s"] + 300)
    assert Alerts(AlertsConfig(on=("stall",))).look(facts) == []


def test_a_process_that_is_started_again_says_nothing_twice():
    first = Alerts(AlertsConfig(on=("nan",)))
    facts = WRONG["nan"][0]()
    assert len(first.look(facts)) == 1
    again = Alerts(AlertsConfig(on=("nan",)), json.loads(json.dumps(first.state)))
    assert again.look(facts) == []


def test_two_nodes_are_two_alerts():
    findings = [finding("straggler"), {**finding("disk_slow"), "ranks": [], "process": "launcher-node2"}]
    found = Alerts(AlertsConfig(on=("node_in_doubt",))).look(healthy(events=findings))
    assert {alert.subject for alert in found} == {"straggler rank 1", "disk_slow node2"}


def test_each_kind_of_finding_is_an_alert_but_one_that_only_moves_layers():
    rows = re.findall(r"^\| `.*\| (.*) \|$", str(detect.__doc__), re.MULTILINE)
    kinds = {kind for row in rows for kind in row.split(", ")}
    assert kinds - FINDINGS.keys() == {"uneven_stages", "disk_full"}  # the disk has an alert of its own


def test_a_stall_is_judged_by_the_runs_own_steps():
    long = columns(step_s=30.0)
    facts = healthy(steps=long)
    config = AlertsConfig(on=("stall",))
    assert Alerts(config).look(at(facts, 300.0)) == []
    assert states(Alerts(config).look(at(facts, 700.0))) == [("stall", "begins")]


def test_who_looks_now_sees_what_was_told_and_what_holds_now():
    told = Alerts(AlertsConfig(on=("nan",))).look(WRONG["nan"][0]())[0].record()
    facts = WRONG["nan"][0]()
    events = [
        *facts.events,
        {**told, "event": "alert", "process": "alerts"},
        {"time_s": 1.0, "event": "alert", "alert": "x"},
    ]
    found = standing(at(replace(facts, events=events), 90.0))
    assert states(found) == [("stall", "begins"), ("nan", "begins")]
