"""Charts of characters."""

from __future__ import annotations

from argosy.observe.charts import LineChart, bar, heights, stacked


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
