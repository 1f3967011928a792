"""Charts out of characters: a line of braille dots, bars of eighths of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.text import Text

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character's dots: its two columns, from top to bottom (Unicode 15, section 21.1)."""
DOT_COLUMNS, DOT_ROWS = 2, 4
EIGHTHS = " ▏▎▍▌▋▊▉█"
HEIGHTS = "▁▂▃▄▅▆▇█"
Points = Sequence[tuple[float, float]]


class LineChart:
    """Lines over a common grid of `width` x `height` cells, each cell with 2 x 4 dots."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]):
        """x, y: the ends of the axes."""
        self._columns, self._rows = width * DOT_COLUMNS, height * DOT_ROWS
        self._x, self._y = x, y
        self._cells = [[0] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def line(self, points: Points, style: str) -> None:
        """Draw a line through the mean of the points of each column of dots; it covers those before."""
        sums: dict[int, tuple[float, int]] = {}
        for x, y in points:
            column = self._place(x, self._x, self._columns)
            total, count = sums.get(column, (0.0, 0))
            sums[column] = total + y, count + 1
        before: tuple[int, int] | None = None
        for column in sorted(sums):
            total, count = sums[column]
            row = self._rows - 1 - self._place(total / count, self._y, self._rows)
            self._join(before or (column, row), (column, row), style)
            before = column, row

    def rows(self) -> list[Text]:
        """Return the chart's lines, from top to bottom."""
        return [
            Text.assemble(*((chr(BRAILLE + dots) if dots else " ", style) for dots, style in zip(*row, strict=True)))
            for row in zip(self._cells, self._styles, strict=True)
        ]

    def _join(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        (x0, y0), (x1, y1) = start, end
        length = max(x1 - x0, abs(y1 - y0), 1)
        for part in range(length + 1):
            x, y = round(x0 + (x1 - x0) * part / length), round(y0 + (y1 - y0) * part / length)
            row, column = y // DOT_ROWS, x // DOT_COLUMNS
            self._cells[row][column] |= DOTS[x % DOT_COLUMNS][y % DOT_ROWS]
            self._styles[row][column] = style

    @staticmethod
    def _place(value: float, axis: tuple[float, float], count: int) -> int:
        low, high = axis
        share = (value - low) / (high - low) if high > low else 0.5
        return min(count - 1, max(0, int(share * (count - 1) + 0.5)))


def bar(share: float, width: int) -> str:
    """Return a bar of `width` cells that is filled as far as `share`, 0 to 1, to an eighth of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(width)


def stacked(values: Iterable[tuple[float, str]], total: float, width: int) -> Text:
    """Return the parts (value, style) of `total` beside each other, in whole cells of `width`; nothing after them."""
    text, done, at = Text(), 0.0, 0
    for value, style in values:
        done += value
        end = round(width * min(1.0, done / total)) if total else 0
        text.append("█" * (end - at), style)
        at = end
    return text


def heights(values: Sequence[float], top: float) -> str:
    """Return a column for each value, the highest for `top`."""
    return "".join(HEIGHTS[min(7, max(0, int(8 * value / top)))] if top else HEIGHTS[0] for value in values)
