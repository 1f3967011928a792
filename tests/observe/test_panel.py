"""The panel: its lines fit, and say what there is.

Charts of characters.
"""

from __future__ import annotations

import math

import pytest

from argosy.observe.panel import LEAST_ROWS, LineChart, RunView, bar, fits, heights, one_line, panel, stacked

RECORD = {
    "step": 139, "tokens": 2_300_000, "loss": 3.4123, "tokens_per_s": 5120.0, "mfu": 0.614, "step_time_s": 0.402,
    "memory_bytes": 310e6,
}  # fmt: skip
PARTS = {"forward_backward": 0.3, "communication": 0.05, "optimizer": 0.04, "rest": 0.012}
VIEW = RunView(
    name="demo", model="llama-5m (5.2M)", plan="dp_replicate=2,microbatch=4", processes=2, steps=600, left_s=188.4,
    record=RECORD, losses=[(step, 8 / (1 + step / 20)) for step in range(140)], validation=[(99, 3.9), (119, 3.55)],
    parts=PARTS, predicted_parts={**PARTS, "rest": 0.003}, predicted_step_s=0.393, predicted_memory_bytes=290e6,
    ranks={0: 0.3, 1: 0.31, 2: 0.4},
    stops=[("9 seen, 0.41 expected (0 to 1)", "yellow"), *[(f"HBM {k}, 0.05 expected", "") for k in range(20)]],
    events=[(1.7e9, "saved step 100", "green"), (1.7e9, "worker 1 died: it\nis", "red")],
)  # fmt: skip


def text(view: RunView, columns: int = 100, rows: int = 30) -> str:
    return "\n".join(line.plain for line in panel(view, columns, rows))


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("rows", [20, 50])
@pytest.mark.parametrize("view", [VIEW, RunView(name="x", record=RECORD)], ids=["full", "bare"])
def test_no_line_is_wider_than_the_terminal_and_rows_are_left_for_messages(view, columns, rows):
    lines = panel(view, columns, rows)
    assert all(line.cell_len < columns for line in lines)
    assert len(lines) <= rows - 4 and lines[0].plain == ""


def test_it_says_where_the_run_is():
    shown = text(VIEW, columns=130)
    for part in (
        "demo   llama-5m (5.2M)   2 processes   dp_replicate=2", "step 140/600", "23%  eta 3:08", "loss 3.412",
        "val  3.550 at 120", "5.1k tok/s  MFU 61%", "310 MB (plan 290 MB)", "comm 50.0 ms (50.0 ms)",
        "rest 12.0 ms (3.00 ms)", "rank 2 is slow: 29% above the median", "saved step 100", "worker 1 died: it is",
    ):  # fmt: skip
        assert part in shown, shown


@pytest.mark.parametrize(("step_s", "said"), [(0.384, "0.38 s a step (plan"), (31.04, "31.0 s a step (plan")])
def test_the_predicted_step_stands_whole_beside_the_chart(step_s, said):
    shown = text(RunView(**{**vars(VIEW), "record": {**RECORD, "step_time_s": step_s}}), columns=80, rows=40)
    assert f"{said} 0.39 s)" in shown, shown


def test_measured_and_predicted_parts_are_drawn_on_one_scale():
    time, plan = (line for line in text(VIEW).splitlines() if line.split()[:1] in (["time"], ["plan"]))
    assert time.count("█") / plan.count("█") == pytest.approx(0.402 / 0.393, rel=0.03)


def test_stops_of_as_many_components_as_have_room_are_shown():
    assert " stops   9 seen, 0.41 expected (0 to 1); HBM 0, 0.05 expected\n" in text(VIEW, columns=80)
    assert "HBM 1" not in text(VIEW, columns=80)
    assert "; HBM 9, 0.05 expected\n" in text(VIEW, columns=80, rows=40)


def test_what_it_does_now_and_who_stands_still_are_said():
    shown = text(RunView(**{**vars(VIEW), "doing": "evaluating, batch 3 of 40", "standing_s": {1: 31.2, 0: 12.0}}))
    assert "demo   evaluating, batch 3 of 40" in shown
    assert "rank 1 and 1 more: no progress for 31 s" in shown


def test_a_line_of_parameter_servers_has_no_mfu():
    view = RunView(**{**vars(VIEW), "record": {key: value for key, value in RECORD.items() if key != "mfu"}})
    assert "5.1k tok/s" in text(view) and "MFU" not in text(view)
    assert "5.1k tok/s" in one_line(view).plain and "MFU" not in one_line(view).plain


def test_the_first_steps_leave_room_for_the_rest():
    view = RunView(**{**vars(VIEW), "losses": [(step, 100.0 if step < 3 else 3.0) for step in range(140)]})
    assert "100.00" not in text(view)


def test_numbers_that_are_not_finite_do_not_break_it():
    losses = [(0, math.nan), (1, math.inf), (2, 3.0)]
    shown = text(RunView(**{**vars(VIEW), "losses": losses, "record": {**RECORD, "loss": None, "mfu": 1.7}}))
    assert "loss not finite" in shown and "MFU n/a" in shown


def test_a_world_of_many_ranks_fits_one_line_that_shows_the_slow_one():
    ranks = {rank: 9.0 if rank == 7777 else 1.0 for rank in range(16_384)}
    lines = text(RunView(**{**vars(VIEW), "ranks": ranks})).splitlines()
    (line,) = (line for line in lines if line.startswith(" ranks"))
    assert line.count("█") == 1 and "rank 7777 is slow" in line


def test_small_terminals_have_one_line():
    assert not fits(79, 50) and not fits(200, LEAST_ROWS - 1) and fits(80, LEAST_ROWS)
    assert one_line(RunView(doing="starting")).plain == "  starting"
    assert one_line(VIEW).plain == " step   140/600  loss 3.412  val 3.550  5.1k tok/s  eta 3:08  MFU 61%  402 ms"


def test_a_line_goes_from_corner_to_corner():
    chart = LineChart(3, 2, x=(0, 5), y=(0, 7))
    chart.line([(step, step * 7 / 5) for step in range(6)], "cyan")
    assert [row.plain for row in chart.rows()] == [" ⢀⠎", "⡠⠃ "]
    first, last = chart.rows()[-1].plain, chart.rows()[0].plain
    assert ord(first[0]) & 0x40 and ord(last[-1]) & 0x08  # the dots in the lower left and the upper right corner


def test_a_column_shows_the_mean_of_its_points_and_a_flat_line_is_in_the_middle():
    chart = LineChart(1, 1, x=(0, 100), y=(0, 3))
    chart.line([(0, 0), (1, 3), (2, 0), (3, 3)], "")
    (row,) = chart.rows()
    assert row.plain == chr(0x2800 + 0x02)  # 1.5 of 3, rounded up, in the left column
    flat = LineChart(2, 1, x=(0, 1), y=(5, 5))
    flat.line([(0, 5), (1, 5)], "")
    assert all(ord(cell) > 0x2800 for cell in flat.rows()[0].plain)


def test_a_bar_is_filled_to_an_eighth_of_a_cell():
    assert [bar(share, 2) for share in (-1, 0, 1 / 16, 0.5, 1, 7)] == ["  ", "  ", "▏ ", "█ ", "██", "██"]


def test_stacked_parts_fill_the_width_together():
    row = stacked([(1.0, "blue"), (1.0, "red"), (0.0, "green"), (2.0, "cyan")], 4.0, 8)
    assert row.plain == "█" * 8
    assert [(span.end - span.start, span.style) for span in row.spans] == [(2, "blue"), (2, "red"), (4, "cyan")]
    assert stacked([(0.0, "blue")], 0.0, 8).plain == ""


def test_heights_are_shares_of_the_highest():
    assert heights([0.0, 0.5, 1.0], 1.0) == "▁▅█"
    assert heights([0.0], 0.0) == "▁"
