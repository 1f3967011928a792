"""The page of `argosy watch`, in a real browser: what it shows, what it does, what it bears."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from browser import Watched, chromium, look, serve
from matrix import STEADY
from run_folders import Made, Trouble, append

HOSTILE = "<img src=x onerror=window.hacked=1>"
VIEWS = ("run", "time", "memory", "ranks", "devices", "events", "model", "advice", "energy", "profiles")
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
TROUBLE = Trouble(straggler=(2, 120), spike=200, killed=(1, 260))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: one with trouble, a hostile one, one of NaN, one without a step, and a crowd."""
    folder = tmp_path_factory.mktemp("runs")
    Made(steps=400, trouble=TROUBLE, experts=4, user=("reward",)).write(folder / "troubled")
    Made(steps=150).write(folder / "calm")
    Made(steps=60, trouble=Trouble(nan=30)).write(folder / "nan")
    hostile = Made(steps=20, trouble=Trouble(crash=True)).write(folder / HOSTILE)
    append(hostile / "events" / "rank-0.jsonl", {"time_s": 1_795_000_030.0, "event": HOSTILE, "why": HOSTILE})
    append(hostile / "samples.jsonl", {"step": 1, "time_s": 1.0, "prompt": HOSTILE, "text": HOSTILE})
    Made(steps=0, is_finished=False).write(folder / "empty")
    for number in range(100):
        Made(steps=3, ranks=1).write(folder / "sweep" / f"lr-{number:03}")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def server(browser: Any, runs: Path) -> Iterator[str]:
    """Asks for the browser first, so that nothing starts where there is none."""
    with serve(runs) as address:
        yield address


@pytest.fixture(scope="module")
def tab(browser: Any, server: str) -> Iterator[Watched]:
    """One for all: a new one is a new process of the browser, which compiles the page anew."""
    with look(browser, server) as shared:
        yield shared


@pytest.fixture
def open_page(browser: Any, server: str, tab: Watched) -> Iterator[Callable[..., Watched]]:
    """Open the page: without storage in the common tab, then or with keys of a context in one of its own. At the end
    the console must be without errors.
    """
    with ExitStack() as stack:
        opened: list[Watched] = []

        def start(**context: Any) -> Watched:
            if context or opened:
                opened.append(stack.enter_context(look(browser, server, **context)))
            else:
                opened.append(tab)
                tab.complaints.clear()
                tab.page.goto(server)
                tab.page.evaluate("localStorage.clear()")
            return opened[-1]

        yield start
        for each in opened:
            assert not each.complaints


def text(watched: Watched, selector: str) -> str:
    """What can be read there; a space that does not break is a space."""
    return " ".join(watched.page.inner_text(selector).split())


def turn_to(page: Any, view: str) -> None:
    """Choose a view by its tab, and wait until it is there."""
    page.locator(f'.tabs [data-view="{view}"]').click()
    page.wait_for_selector(f".view-{view}")
    page.wait_for_selector("p.loading", state="hidden")


def test_a_straggler_a_spike_and_a_killed_rank_are_shown_and_named_by_the_advice(open_page):
    watched = open_page()
    page = watched.open("?run=troubled", view="ranks")
    assert "straggler" in text(watched, ".findings") and "rank 2" in text(watched, ".findings")
    assert "died" in text(watched, ".findings") and "rank 1" in text(watched, ".findings")
    turn_to(page, "events")
    assert page.locator('[data-event="worker_died"].fault').count() == 1
    assert page.locator('[data-event="straggler"].fault').count() == 1
    turn_to(page, "run")
    highest = max(rows(watched, "Loss"), key=lambda row: float(row["greatest"] or row["Loss"]))
    assert int(highest["step"]) == TROUBLE.spike
    turn_to(page, "advice")
    told = text(watched, "#view")
    for named in ("Rank 2 on node-1 is slow", "Rank 1 died", f"step {TROUBLE.spike}: loss"):
        assert named in told


def rows(watched: Watched, chart: str) -> list[dict[str, str]]:
    """The CSV that the chart's button downloads."""
    with watched.page.expect_download() as download:
        watched.page.get_by_role("button", name=f"CSV of {chart}").click()
    with Path(download.value.path()).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


LABELS = """async () => {
  const [{ axesOf }, { percent, duration, bytes, number }] = await Promise.all([import("/static/chart_axes.js"),
    import("/static/format.js")]);
  const labels = (axis, places) => axesOf({ axis }, {})[1].values(null, places);
  return [labels(percent, [0.275, 0.3, 0.325]), labels(percent, [0.2, 0.3]), labels(duration, [60, 90, 120]),
    labels(bytes, [72.51e9, 72.52e9]), labels(number, [8000, 8500, 9000]), labels(number, [500, 8000, 10000])];
}"""
HIGHEST = """async (highest) => {
  const { scalesOf } = await import("/static/chart_axes.js");
  const top = (losses) => {
    const plot = { series: [{ idxs: [0, losses.length - 1] }], data: [losses.map((_, i) => i), losses] };
    return scalesOf({ kind: "lines" }, {}).y.range(plot, Math.min(...losses), Math.max(...losses))[1];
  };
  const falling = [...Array(100).keys()].map((i) => 2 + 6 / (1 + i));
  const high = (from, to) => falling.map((loss, i) => (i >= from && i < to ? highest : loss));
  return [top(falling), top(high(50, 52)), top(high(50, 56)), top(high(50, 52).slice(30, 70))];
}"""


def test_labels_of_an_axis_say_where_they_are_with_no_digit_too_many(open_page):
    found = open_page().page.evaluate(LABELS)
    assert [[label.replace("\u00a0", " ") for label in each] for each in found] == [
        ["27.5 %", "30.0 %", "32.5 %"],
        ["20 %", "30 %"],
        ["1 min", "1 min 30 s", "2 min"],
        ["72.51 GB", "72.52 GB"],
        ["8\u202f000", "8\u202f500", "9\u202f000"],
        ["500", "8k", "10k"],
    ]


def test_a_spike_of_a_moment_leaves_the_chart_and_the_rest_stays_readable(open_page):
    falling, spike, plateau, few = open_page().page.evaluate(HIGHEST, 900)
    assert spike == falling < 9
    assert plateau > 900 and few > 900  # what stays is no spike; and whoever zooms in sees all of it


@pytest.mark.slow
def test_what_is_alike_or_said_already_is_said_once(open_page):
    watched = open_page()
    watched.open("?run=troubled", view="memory")
    assert "All ranks have" in text(watched, "main")
    watched.open("?run=troubled", view="events")
    saves = watched.page.locator('[data-event="save"]')
    assert (
        " steps" in saves.first.locator(".what").inner_text() and "step" not in saves.first.locator(".by").inner_text()
    )


def test_a_chart_is_downloaded_as_csv_and_as_a_picture(open_page, runs):
    watched = open_page()
    watched.open("?run=calm")
    got = {int(row["step"]): float(row["Gradient norm"]) for row in rows(watched, "Gradient norm")}
    lines = map(json.loads, (runs / "calm" / "metrics.jsonl").read_text().splitlines())
    assert got == pytest.approx({line["step"]: line["grad_norm"] for line in lines if "grad_norm" in line})
    with watched.page.expect_download() as download:
        watched.page.get_by_role("button", name="PNG of Loss").click()
    assert download.value.suggested_filename == "calm-Loss.png"
    picture = Path(download.value.path()).read_bytes()
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20], "big") > 600


def test_the_page_follows_a_run_and_says_when_it_cannot(browser, tmp_path):
    made = Made(steps=40, total_steps=80, is_finished=False)
    with ExitStack() as stack:
        served = ExitStack()
        base = served.enter_context(serve(tmp_path))
        stack.push(served)
        watched = stack.enter_context(look(browser, base))
        watched.open()
        assert "no runs in this folder" in text(watched, "main")
        assert not watched.complaints
        folder = made.write(tmp_path / "going-on")
        page = watched.open("?run=going-on")
        page.wait_for_selector("#live.live")
        assert "step 40 of 80" in text(watched, ".vital.alive")
        append(folder / "metrics.jsonl", *(made.metric_line(step) for step in range(40, 55)))
        page.wait_for_selector(".vital.alive:has-text('step 55')")
        served.close()
        page.wait_for_selector("#live.waiting, #live.lost")
        again = serve(tmp_path, "--port", base.rsplit(":", 1)[1])
        append(folder / "metrics.jsonl", *(made.metric_line(step) for step in range(55, 60)))
        stack.enter_context(again)
        page.wait_for_selector("#live.live")
        page.wait_for_selector(".vital.alive:has-text('step 60')")


@pytest.mark.slow
def test_a_dragged_range_is_asked_of_the_server_and_the_address_shows_another_reader_the_same(open_page):
    watched = open_page()
    page = watched.open("?run=troubled")
    box = page.locator('[data-chart="Loss"] .u-over').bounding_box()
    middle = box["y"] + box["height"] / 2
    with page.expect_response(lambda answer: "/series?" in answer.url and "from=" in answer.url):
        page.mouse.move(box["x"] + box["width"] * 0.25, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=4)
        page.mouse.up()
    page.wait_for_selector(".range button:visible")
    page.get_by_role("button", name="log values").click()
    page.locator("#smooth").fill("0.5")
    query = page.url.partition("?")[2]
    assert "from=" in query and "log=y" in query and "smooth=0.5" in query
    other = open_page()
    other.open(f"?{query}")
    steps = [int(row["step"]) for row in rows(other, "Loss") if row["run"] == "training"]
    assert 80 <= min(steps) <= 120 and 180 <= max(steps) <= 220
    assert other.page.locator("[data-log=y]").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_several_runs_lie_over_each_other_in_colours_that_stay(open_page):
    watched = open_page()
    page = watched.open("?run=troubled")
    page.get_by_role("checkbox", name="Show calm").check()
    page.wait_for_selector('[data-chart="Gradient norm"] .legend li:nth-child(2)')
    shown = legend(page)
    assert set(shown) == {"troubled", "calm"} and len(set(shown.values())) == 2
    watched.open("?run=calm&run=nan")
    assert legend(page)["calm"] == shown["calm"]


def legend(page: Any) -> dict[str, str]:
    """Name -> colour in the legend of the gradient norm."""
    items = page.locator('[data-chart="Gradient norm"] .legend li').all()
    return {item.locator(".name").inner_text(): item.locator(".swatch").get_attribute("style") for item in items}


def test_nothing_is_cut_off_on_a_phone(open_page):
    watched = open_page(**PHONE)
    page = watched.open()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    watched.open("?run=troubled")
    for view in VIEWS:
        page.locator(f'.tabs [data-view="{view}"]').tap()
        page.wait_for_selector(f".view-{view}")
        page.wait_for_selector("p.loading", state="hidden")
        assert page.locator("#view").inner_text().strip()
        assert page.evaluate("document.documentElement.scrollWidth") == 360, view


@pytest.mark.slow
def test_a_phone_chooses_a_run_from_the_drawer(open_page):
    watched = open_page(**PHONE)
    page = watched.open("?run=troubled")
    assert not page.locator("#side").is_visible()
    page.get_by_role("button", name="Choose runs").tap()
    page.locator("#side a", has_text="calm").tap()
    page.wait_for_selector("h1:text-is('calm')")


@pytest.mark.slow
def test_light_and_dark_follow_the_system_until_the_reader_chooses(open_page):
    watched = open_page(color_scheme="dark")
    page = watched.open("?run=calm")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.keyboard.press("t")
    light = page.evaluate(ground)
    assert dark != light and page.evaluate("document.documentElement.dataset.theme") == "light"
    page.reload()
    assert page.evaluate(ground) == light


def test_the_keyboard_reaches_everything(open_page):
    watched = open_page()
    page = watched.open("?run=troubled")
    page.keyboard.press("?")
    assert page.get_by_role("dialog", name="Keyboard").is_visible()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    for number, view in enumerate(VIEWS, 1):
        page.keyboard.press(str(number % 10))
        page.wait_for_selector(f'.tabs [data-view="{view}"][aria-current="page"]')
    page.keyboard.press("1")
    page.wait_for_selector('[data-chart="Loss"] .u-over')
    page.locator('[data-chart="Loss"] .plot').focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert "step 1" in page.locator("#said").inner_text()
    page.keyboard.press("+")
    page.wait_for_url("**from=**")
    page.keyboard.press("r")
    page.wait_for_selector("table.runs")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_hostile_name_or_text_stays_text(open_page):
    watched = open_page()
    page = watched.open()
    row = page.locator("table.runs tr", has_text=HOSTILE)
    row.locator("a").click()
    page.wait_for_selector("#vitals .vital")
    for view in VIEWS:
        turn_to(page, view)
        if view in ("events", "model"):
            assert HOSTILE in page.inner_text("#view")
    assert page.evaluate("window.hacked") is None
    assert not page.locator("img[src=x]").count()


def test_a_hundred_runs_are_listed_filtered_and_sorted(open_page):
    watched = open_page()
    page = watched.open()
    assert page.locator("table.runs tbody tr").count() == 105
    page.get_by_role("searchbox", name="Filter the runs").fill("sweep finished lr-07")
    assert page.locator("table.runs tbody tr").count() == 10
    page.get_by_role("button", name="Run", exact=True).click()
    assert "lr-070" in page.locator("table.runs tbody tr").first.inner_text()


def test_what_is_not_there_is_said(open_page):
    watched = open_page()
    watched.open("?run=empty")
    assert "No step has been made yet" in text(watched, "main")
    watched.open("?run=nan&from=30&to=30")
    assert "No finite value in this range" in text(watched, '[data-chart="Loss"]')
    watched.open("?run=nobody")
    assert "There is no run nobody" in text(watched, "main")
    watched.open("?run=calm", view="profiles")
    assert "argosy train --profile" in text(watched, "#view")


@pytest.mark.slow
def test_a_real_run_is_followed_through_its_faults(browser, disturbed):
    slow = "slow@forward:rank=0,seconds=0.05; slow@forward:rank=1,seconds=0.2"
    faults = f"{slow}; kill@optimizer:step=8,rank=0; spike@gradient:step=50,rank=0,factor=1000"
    options = ("--train.steps", "70", *STEADY, "--resilience.straggler_s", "1", "--resilience.spike_warmup_steps", "20")
    run = disturbed("dp_replicate=2,microbatch=4", faults, *options).wait_for_step(5)
    with serve(run.run_dir.parent) as base, look(browser, base) as watched:
        page = watched.open()
        page.wait_for_selector(".vital.alive:has-text('training')")
        run.end(timeout_s=300)
        page.wait_for_selector(".vital.alive:has-text('finished')")
        watched.open(view="ranks")
        assert "straggler rank 1" in text(watched, ".findings") and "died rank 0" in text(watched, ".findings")
        watched.open(view="events")
        for event in ("worker_died", "recovered", "straggler", "transient"):
            assert page.locator(f'[data-event="{event}"]').count(), event
        watched.open(view="advice")
        for named in ("Rank 1", "Rank 0 died", "step 50 was bad"):
            assert named in text(watched, "#view")
        watched.open(view="devices")
        assert "Hosts now" in text(watched, "#view")
        assert not watched.complaints
