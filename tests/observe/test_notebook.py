"""A run in a notebook's cell."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from argosy.observe.notebook import MOST_POINTS, curves, in_html, is_in_notebook
from argosy.observe.run_view import RunView

RECORD = {"step": 9, "loss": 3.0, "tokens_per_s": 10.0, "mfu": 0.5, "step_time_s": 0.1}
VIEW = RunView(name="<demo>", steps=20, record=RECORD, losses=[(0, 5.0), (9, 3.0)], validation=[(4, 4.0)], left_s=9.0)


def test_a_test_is_no_notebook():
    assert not is_in_notebook()


def test_the_cell_shows_progress_curves_and_messages_and_needs_nothing_from_elsewhere():
    page = in_html(RunView(**{**vars(VIEW), "doing": "saving"}), ["worker 1 died: <&>"])
    assert "<b>&lt;demo&gt;</b> step 10/20  loss 3.000" in page and "<i>saving</i>" in page
    assert '<progress value="10" max="20"' in page and "worker 1 died: &lt;&amp;&gt;" in page
    assert "http" not in page and "<script" not in page


def test_curves_are_whole_svg_and_stay_inside():
    losses = [(step, 1000.0 / (1 + step)) for step in range(50 * MOST_POINTS)]
    root = ElementTree.fromstring(curves(RunView(losses=losses, validation=[(3, 2.0), (9_999_999, 1.0)])))
    lines = [line.attrib["points"].split() for line in root if line.tag == "polyline"]
    assert len(lines) == 2 and len(lines[0]) <= MOST_POINTS
    for x, y in (point.split(",") for line in lines for point in line):
        assert 0 <= float(x) <= 640 and 0 <= float(y) <= 180


def test_one_step_has_no_curve():
    assert curves(RunView(losses=[(0, 3.0)])) == ""
    assert re.sub("<.*?>", "", in_html(RunView(doing="starting"), [])).strip() == "starting"
