"""A run in a terminal: the panel is drawn over, messages stay above it, and nothing else is left behind."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest

from argosy.observe import surfaces
from argosy.observe.panel import RunView, panel
from argosy.observe.screen import RunFolder
from argosy.observe.surfaces import SVG_POINTS, TerminalSurface, curves, in_html, is_in_notebook, shown
from emulator import Emulator

RECORD = {
    "step": 9,
    "tokens": 100,
    "loss": 3.0,
    "tokens_per_s": 10.0,
    "mfu": 0.5,
    "step_time_s": 0.1,
    "memory_bytes": 1e6,
}
VIEW = RunView(name="demo", steps=20, record=RECORD, losses=[(0, 5.0), (9, 3.0)], parts={"rest": 0.1})


class Stream(io.StringIO):
    """A terminal's end that is written to."""

    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, emulator: Emulator):
        super().__init__()
        self._emulator = emulator

    def write(self, text: str) -> int:
        self._emulator.feed(text)
        return super().write(text)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 x 24, and the surface in it."""
    made = Emulator()
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((made.columns, made.rows)))
    monkeypatch.setenv("TERM", "xterm-256color")
    return made, TerminalSurface(Stream(made))


def drawn(view: RunView = VIEW, columns: int = 80) -> list[str]:
    return [line.plain for line in panel(view, columns, 24)]


def test_the_panel_is_drawn_over_itself_and_messages_stay_above(terminal):
    emulator, surface = terminal
    for number in range(50):
        surface.show([(f"message {number}", "cyan")] if number % 5 == 0 else [], VIEW)
    kept = [f"message {number}" for number in range(0, 50, 5)]
    assert [line.rstrip() for line in emulator.lines] == [*kept, *drawn(), ""]


def test_the_cursor_rests_below_so_that_the_prompt_stands_there_after_a_kill(terminal):
    emulator, surface = terminal
    surface.show([], VIEW)
    emulator.feed("$ ")
    assert emulator.screen[-1] == "$" and emulator.screen[:-1] == drawn()


def test_a_long_message_is_broken_and_nothing_of_the_panel_shows_through(terminal):
    emulator, surface = terminal
    surface.show([], VIEW)
    surface.show([("long " * 40, ""), ("two\nlines", "")], VIEW)
    assert "".join(emulator.screen[:3]).replace(" ", "") == "long" * 40
    assert emulator.screen[3:] == ["two", "lines", *drawn()]


@pytest.mark.parametrize("sizes", [(200, 80), (80, 200), (80, 60, 80), (100, 60, 200, 80)], ids=str)
def test_a_terminal_may_become_narrower_and_wider(terminal, sizes):
    emulator, surface = terminal
    for columns in sizes:
        emulator.resize(columns)
        surface.show([], VIEW)
    surface.show([("message", "")], VIEW)
    assert emulator.screen == ["message", *drawn(columns=sizes[-1])]


def test_a_small_terminal_has_one_line(terminal):
    emulator, surface = terminal
    emulator.columns = 60
    for _ in range(3):
        surface.show([], RunView(**{**vars(VIEW), "doing": "evaluating"}))
    assert emulator.screen == [" step    10/20  evaluating  loss 3.000  10 tok/s  eta ?  M…"]


def test_at_the_end_one_line_stays_and_then_the_last_words(terminal):
    emulator, surface = terminal
    surface.show([], VIEW)
    surface.close([("argosy: failed", "")], VIEW, is_told=False)
    assert emulator.screen == [" step    10/20  loss 3.000  10 tok/s  eta ?  MFU 50%  100 ms", "argosy: failed"]


def test_a_line_is_not_told_twice(terminal):
    emulator, surface = terminal
    surface.show([("done", "")], RunView(doing="verifying"))
    assert emulator.screen == ["done", "  verifying"]
    surface.close([], VIEW, is_told=True)
    assert emulator.screen == ["done"]


def test_colours_are_left_out_where_the_user_wants_none(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Stream(terminal[0])
    TerminalSurface(stream).show([("red", "red")], VIEW)
    colours = {number for number in stream.getvalue().split("\x1b[") if number[:2] in ("31", "34", "36", "90")}
    assert not colours


def test_after_a_pause_the_panel_is_drawn_below_what_the_shell_has_printed(terminal, monkeypatch):
    emulator, surface = terminal
    surface.show([], VIEW)
    emulator.feed("[1]+ Stopped\n$ fg\n")
    monkeypatch.setattr(surfaces, "AWAY_S", 0.0)
    surface.show([], VIEW)
    lines = [line.rstrip() for line in emulator.lines]
    assert lines == [*drawn(), "[1]+ Stopped", "$ fg", *drawn(), ""]


LINE = {"step": 9, "loss": 3.0, "tokens_per_s": 10.0, "mfu": 0.5, "step_time_s": 0.1}
SHOWN = RunView(name="<demo>", steps=20, record=LINE, losses=[(0, 5.0), (9, 3.0)], validation=[(4, 4.0)], left_s=9.0)


def test_a_test_is_no_notebook():
    assert not is_in_notebook()


def test_the_cell_shows_progress_curves_and_messages_and_needs_nothing_from_elsewhere():
    page = in_html(RunView(**{**vars(SHOWN), "doing": "saving"}), ["worker 1 died: <&>"])
    assert "<b>&lt;demo&gt;</b> step 10/20  loss 3.000" in page and "<i>saving</i>" in page
    assert '<progress value="10" max="20"' in page and "worker 1 died: &lt;&amp;&gt;" in page
    assert "http" not in page and "<script" not in page


def test_curves_are_whole_svg_and_stay_inside():
    losses = [(step, 1000.0 / (1 + step)) for step in range(50 * SVG_POINTS)]
    root = ElementTree.fromstring(curves(RunView(losses=losses, validation=[(3, 2.0), (9_999_999, 1.0)])))
    lines = [line.attrib["points"].split() for line in root if line.tag == "polyline"]
    assert len(lines) == 2 and len(lines[0]) <= SVG_POINTS
    for x, y in (point.split(",") for line in lines for point in line):
        assert 0 <= float(x) <= 640 and 0 <= float(y) <= 180


def test_one_step_has_no_curve():
    assert curves(RunView(losses=[(0, 3.0)])) == ""
    assert re.sub("<.*?>", "", in_html(RunView(doing="starting"), [])).strip() == "starting"


def no_folder(run_dir: Path) -> RunFolder:
    raise AssertionError("nothing shows a run where no terminal is")


def test_what_is_printed_to_the_descriptor_is_written_to_an_output_that_has_none():
    out = io.StringIO()
    with redirect_stdout(out), shown(no_folder) as where:
        subprocess.run(["/bin/echo", "step 1\nbroken \udcff"], stdout=where.stdout, check=True)
    assert out.getvalue() == "step 1\nbroken \N{REPLACEMENT CHARACTER}\n"


def test_an_output_that_was_closed_keeps_nobody_waiting():
    out = io.StringIO()
    with redirect_stdout(out), shown(no_folder) as where:
        out.close()
        os.write(where.stdout, b"words\n" * 100_000)  # more than a pipe holds


def test_the_standard_output_needs_no_detour():
    code = "from argosy.observe.surfaces import shown\nwith shown(None) as where: print(where.stdout, where.screen)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "None None\n"
