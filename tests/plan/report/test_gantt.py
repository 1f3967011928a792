"""A schedule is drawn to scale in the terminal and on a page, with what is late and the commands by their time."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from argosy.plan.cost.estimate import HOUR, Estimate
from argosy.plan.report.gantt import BARS, headline, page, show
from argosy.plan.report.jobs import JobCommand, JobSchedule, ScheduledJob
from argosy.plan.search.schedule import Stint


def job(name: str, first_h: float, last_h: float, devices: int, late_h: float = 0.0) -> ScheduledJob:
    end_s = last_h * HOUR
    return ScheduledJob(
        name=name,
        cluster="north",
        stints=(Stint(first_h * HOUR, end_s, devices),),
        is_elastic=False,
        begin_s=first_h * HOUR,
        end_s=Estimate.exactly(end_s),
        deadline_s=end_s - late_h * HOUR if late_h else None,
        late_s=late_h * HOUR,
        in_time=0.25 if late_h else None,
        late_cost=1000.0 if late_h else None,
        device_hours=(last_h - first_h) * devices,
        money=None,
        commands=(JobCommand(first_h * HOUR, (f"# {name}", f"start {name}")),),
    )


def schedule(*jobs: ScheduledJob) -> JobSchedule:
    return JobSchedule(
        jobs=jobs,
        clusters={"north": 8},
        described={"north": "8 devices <fast>"},
        currency="EUR",
        end_s=max(float(each.end_s.mid) for each in jobs),
        late_cost=sum(each.late_cost or 0.0 for each in jobs),
        once=("prepare",),
        used={"north": 0.5},
    )


LATE = schedule(job("second", 5, 10, 4, late_h=2), job("first", 0, 5, 8))


def printed(found: JobSchedule) -> list[str]:
    out = io.StringIO()
    show(found, Console(file=out, width=120))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (schedule(job("one", 0, 5, 8)), "1 job, done at +5.0 h; none late"),
        (LATE, "2 jobs, done at +10.0 h; 1 late: second; being late costs 1.00k EUR on average"),
    ],
)
def test_the_headline_says_what_is_late_and_what_that_costs(found: JobSchedule, words: str) -> None:
    assert headline(found) == words


def test_bars_are_as_high_as_their_share_and_as_long_as_their_time() -> None:
    bars = {line.split()[0]: line for line in printed(LATE) if re.match(r"(first|second) +[▁-█|]", line)}
    full, half = (re.findall(f"[{BARS[1:]}]", bars[name]) for name in ("first", "second"))
    assert set(full) == {BARS[8]}
    assert set(half) == {BARS[4]}
    assert bars["first"].index(BARS[8]) < bars["second"].index(BARS[4])
    assert len(full) == pytest.approx(len(half) + 1, abs=1)  # the deadline is drawn over one of them
    assert bars["second"].count("|") == 1


def test_commands_are_in_the_order_of_their_time() -> None:
    lines = printed(LATE)
    at = lines.index("Commands, for the clusters' own schedulers:")
    assert lines[at + 1 :] == ["prepare", "# first", "start first", "# second", "start second"]


def test_the_page_has_a_bar_for_each_stint_and_escapes_names() -> None:
    text = page(LATE)
    places = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="[\d.]+" height="([\d.]+)" width="([\d.]+)"', text)
    (late, x_late, high_late, wide_late), (bar, x_bar, high_bar, wide_bar) = places
    assert (late, bar) == ("loss", "bar")
    assert float(high_bar) == 2 * float(high_late)
    assert float(wide_bar) == pytest.approx(float(wide_late), abs=0.2)
    assert float(x_late) == pytest.approx(float(x_bar) + float(wide_bar), abs=0.2)
    assert "8 devices &lt;fast&gt;" in text
    assert "second: deadline +8.0 h" in text
