"""Up, down or sideways: what is left of a run on other numbers of devices, and which of them is recommended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from argosy.errors import UserError
from argosy.plan.cost.estimate import seconds
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.report import terminal
from argosy.watch.facts import RunFacts
from argosy.watch.resize import Resizing, resizing, rest_of, show
from argosy.watch.rules.planner import Planner
from watched import H100, big_run, columns, healthy

PLAN = "dp_shard=16,zero=3,recompute=full,microbatch=1,precision=bf16,bucket_mb=64"
MACHINES = replace(H100, processes=16)
DAY = 86_400.0


def run(step_s: float = 32.0) -> RunFacts:
    """An 8B model on 16 H100, with 9600 steps left."""
    return healthy(big_run(), PLAN, hardware=MACHINES, steps=columns(step_s=step_s))


def ask(facts: RunFacts, *clusters: str, days: float | None = None) -> Resizing:
    others = [(name, Cluster.parse(name)) for name in clusters]
    return resizing(facts, Planner(facts), others, None if days is None else days * DAY)


@pytest.fixture(scope="module")
def now() -> Resizing:
    """Return the ways to go on without a limit."""
    return ask(run())


def test_the_measured_speed_is_what_all_sizes_are_scaled_from(now):
    twice = ask(run(step_s=64.0))
    for quick, slow in zip(now.options, twice.options, strict=True):
        assert quick.devices == slow.devices
        assert float(slow.left_s.mid) == pytest.approx(2 * float(quick.left_s.mid), rel=0.1)
    assert now.options[0].is_measured
    assert float(now.options[0].left_s.mid) == pytest.approx(9600 * 32, rel=0.1)
    half, double = (next(o for o in now.options if o.devices == n and not o.is_measured) for n in (8, 32))
    assert float(double.left_s.mid) < float(now.options[0].left_s.mid) < float(half.left_s.mid)


@pytest.mark.parametrize("width", [80, 120])
def test_no_figure_and_no_plan_is_cut_where_lines_are_short(now, capsys, monkeypatch, tmp_path, width):
    monkeypatch.setattr(terminal, "PIPE_WIDTH", width)
    show(now, tmp_path)
    said = capsys.readouterr().out
    assert "…" not in said and seconds(now.options[0].step_s.mid) in said
    assert {option.plan for option in now.options} <= set(said.split())


def test_what_a_run_has_done_of_its_batch_ramp_is_not_planned_again():
    ramp = ({"until_step": 200, "global_batch": 64}, {"until_step": 600, "global_batch": 128})
    ramped = big_run(train={"batch_ramp": ramp})
    assert [(s.until_step, s.global_batch) for s in rest_of(ramped, 9600).train.batch_ramp] == [(200, 128)]
    assert rest_of(ramped, 9000).train.batch_ramp == ()
    late = healthy(ramped, PLAN, hardware=MACHINES, steps=columns(2000, step_s=32.0))
    plain = healthy(big_run(), PLAN, hardware=MACHINES, steps=columns(2000, step_s=32.0))
    of_ramped, of_plain = (ask(facts, "16xh200").options[-1] for facts in (late, plain))
    assert float(of_ramped.left_s.mid) == pytest.approx(float(of_plain.left_s.mid), rel=1e-3)


def test_a_run_that_is_late_is_scaled_up_and_one_with_time_down(now):
    now_days = float(now.options[0].left_s.mid) / DAY
    up = ask(run(), days=0.6 * now_days)
    assert (up.direction, up.recommended.devices > 16) == ("up", True)
    assert float(up.recommended.left_s.mid) <= 0.6 * now_days * DAY
    assert "Scale up to" in up.words and up.recommended.plan in up.words
    down = ask(run(step_s=120.0), days=100)
    assert down.direction in ("down", "sideways", "stay")
    assert float(down.recommended.device_hours.mid) <= float(down.options[0].device_hours.mid)


def test_another_cluster_that_does_it_for_less_is_sideways():
    cheap = Cluster.parse("16xh200").model_copy(update={"price_per_device_h": 0.1})
    facts = run()
    found = resizing(facts, Planner(facts), [("ours", cheap)], 8 * DAY)
    assert (found.direction, found.recommended.where) == ("sideways", "ours")


def test_what_no_size_can_do_is_said_with_the_fastest():
    found = ask(run(), days=0.01)
    assert "Not within 14.4 min: the fastest is" in found.words
    assert float(found.recommended.left_s.mid) == min(float(option.left_s.mid) for option in found.options)


def test_a_run_that_has_ended_or_has_hardly_begun_is_refused():
    with pytest.raises(UserError, match="has ended"):
        ask(healthy(big_run(), PLAN, hardware=MACHINES, state="finished"))
    with pytest.raises(UserError, match="too little"):
        ask(healthy(big_run(), PLAN, hardware=MACHINES, steps=columns(5, step_s=32.0)))
