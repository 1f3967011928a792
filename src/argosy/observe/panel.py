"""The panel: a run at one moment in a dozen lines of a terminal, at least 80 columns wide.

Its charts are of characters: a line of braille dots, bars of eighths of a cell.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from argosy.plan.calibration import COMMUNICATION, OPTIMIZER, PASSES, REST
from argosy.plan.cost.estimate import seconds


@dataclass(frozen=True)
class RunView:
    """A run at one moment. What is not known is left at its default."""

    name: str = ""
    model: str = ""
    """Its name and size in words."""
    plan: str = ""
    processes: int = 0
    steps: int | None = None
    """Steps of the whole run; None as long as a run in minutes does not know them."""
    left_s: float | None = None
    """Seconds to the end."""
    doing: str = ""
    """Present work beside training; "" while it trains."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The newest step's line of metrics.jsonl."""
    losses: Sequence[tuple[int, float]] = ()
    """(step, loss), 0-based steps in order; thinned out in long runs."""
    validation: Sequence[tuple[int, float]] = ()
    """(step, loss on held-out text)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Part of a step (`plan.calibration.CALIBRATED_PARTS`) -> seconds, the mean of the last steps."""
    predicted_parts: Mapping[str, float] = field(default_factory=dict)
    predicted_step_s: float | None = None
    predicted_memory_bytes: float | None = None
    ranks: Mapping[int, float] = field(default_factory=dict)
    """Rank -> seconds of its own work in a step, the mean of the last ones: a slow rank shows here."""
    standing_s: Mapping[int, float] = field(default_factory=dict)
    """Rank -> for how long it has made no progress, for those that stand still."""
    stops: Sequence[tuple[str, str]] = ()
    """(words, style) of the stops so far beside the expected ones: of all, then of each component."""
    events: Sequence[tuple[float, str, str]] = ()
    """(seconds since 1970, words, style), the newest last."""

    @property
    def step(self) -> int:
        return int(self.record["step"]) + 1 if self.record else 0

    @property
    def validation_loss(self) -> float | None:
        """The last loss on held-out text."""
        return self.validation[-1][1] if self.validation else None


def mfu_in_words(mfu: float | None) -> str:
    """Return e.g. "MFU 61%"; "MFU n/a" above 100 %.

    Nothing computes faster than the peak: where it seems so, the peak was measured while the machine was busy.
    """
    return "MFU n/a" if mfu is None or mfu > 1 else f"MFU {mfu:.0%}"


def short(number: float) -> str:
    """Return a number with one digit behind the point and its unit, e.g. 5.1k."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Return seconds as h:mm:ss or m:ss."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


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


LEAST_COLUMNS, LEAST_ROWS = 80, 20
"""The smallest terminal that has room for the panel and for some messages above it."""
TALL = 32
"""A terminal with so many rows has a higher chart and more events."""
WIDE = 110
"""Columns that have room for the predicted seconds of each part beside the measured ones."""
PART_STYLES = {
    PASSES: ("fwd+bwd", "blue"),
    COMMUNICATION: ("comm", "magenta"),
    OPTIMIZER: ("optimizer", "green"),
    REST: ("rest", "bright_black"),
}
"""Part of a step -> its short name and colour."""
LOSS_STYLE, VALIDATION_STYLE, DOING_STYLE = "cyan", "yellow", "yellow"
LABEL_COLUMNS = 9
"""Columns of the names at the left."""
FIGURES = 31
"""Columns of the figures at the right of the chart."""
NAMED_IF_SLOWER = 1.1
"""A rank is named if its own work takes so many times the median."""


def fits(columns: int, rows: int) -> bool:
    """Return True if a terminal of this size has room for the panel."""
    return columns >= LEAST_COLUMNS and rows >= LEAST_ROWS


def panel(view: RunView, columns: int, rows: int) -> list[Text]:
    """Return the panel's lines, none wider than `columns` - 1, for a terminal of this size.

    The first one is empty: what is typed into the terminal, and lines of other processes, do least harm there.
    """
    width, is_tall = columns - 1, rows >= TALL
    lines = [
        Text(),
        _title(view),
        _steps(view, width),
        *_chart(view, width, height=6 if is_tall else 4),
        *_times(view, width),
        *_ranks(view, width),
        *_stops(view, width, most=4 if is_tall else 1),
        *_events(view, count=5 if is_tall else 3),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.rstrip()
    return lines


def one_line(view: RunView) -> Text:
    """Return the run in one line; what is done now stands first, where nothing crops it."""
    step = step_in_words(view.record, view.steps) if view.record else ""
    doing = f"  {view.doing}" if view.doing else ""
    return Text.assemble((step, "bold"), (doing, DOING_STYLE), figures(view.record, view.validation_loss, view.left_s))


def step_in_words(record: Mapping[str, object], steps: int | None) -> str:
    """Return the number of a step's line of metrics.jsonl, of how many."""
    step = record["step"]
    assert isinstance(step, int)
    return f" step {step + 1:>5}/{steps if steps else '?'}"


def figures(record: Mapping[str, object], validation_loss: float | None, left_s: float | None) -> str:
    """Return the figures of a step's line of metrics.jsonl; "" for none."""
    if not record:
        return ""
    parts = [
        f"loss {number(record['loss'])}",
        f"val {validation_loss:.3f}" if validation_loss is not None else "",
        f"{short(float(str(record['tokens_per_s'])))} tok/s",
        f"eta {'?' if left_s is None else duration(left_s)}",
        mfu_in_words(float(str(record["mfu"]))) if "mfu" in record else "",
        f"{float(str(record['step_time_s'])) * 1e3:.0f} ms",
    ]
    return "".join(f"  {part}" for part in parts if part)


def number(loss: object) -> str:
    return f"{loss:.3f}" if isinstance(loss, float | int) else "not finite"


def _title(view: RunView) -> Text:
    processes = f"{view.processes} process{'' if view.processes == 1 else 'es'}" if view.processes else ""
    rest = "   ".join(part for part in (view.model, processes, view.plan) if part)
    doing = f"   {view.doing}" if view.doing else ""
    return Text.assemble((f" {view.name}", "bold"), (doing, DOING_STYLE), (f"   {rest}", "bright_black"))


def _steps(view: RunView, width: int) -> Text:
    head = f" step {view.step}/{view.steps or '?'}"
    share = view.step / view.steps if view.steps else 0.0
    left = f"eta {'?' if view.left_s is None else duration(view.left_s)}"
    tail = f"  {share:4.0%}  {left}" if view.steps else f"  {left}"
    room = max(10, width - len(head) - len(tail) - 2)
    filled = bar(share, room).rstrip()
    rest = "░" * (room - len(filled))
    return Text.assemble((head, "bold"), "  ", (filled, "cyan"), (rest, "bright_black"), tail)


def _chart(view: RunView, width: int, height: int) -> list[Text]:
    """Return the curves of the losses, with figures beside them."""
    room = width - LABEL_COLUMNS - FIGURES
    shown = [(float(step), loss) for step, loss in view.losses if math.isfinite(loss)]
    held_out = [(float(step), loss) for step, loss in view.validation if math.isfinite(loss)]
    labels, rows = [""] * height, [Text()] * height
    if shown:
        # The first steps fall from far above, and would leave no room for the rest.
        later = [loss for _, loss in shown[len(shown) // 20 :]] + [loss for _, loss in held_out[1:]]
        low, high = min(later), max(later)
        chart = LineChart(room, height, (shown[0][0], shown[-1][0]), (low, high))
        chart.line(shown, LOSS_STYLE)
        chart.line(held_out, VALIDATION_STYLE)
        rows = chart.rows()
        labels[0], labels[-1] = f"{high:.2f}", f"{low:.2f}"
    lines = []
    for label, row, (figure, style) in zip(labels, rows, _figures(view, height), strict=True):
        curve = row.copy()
        curve.truncate(room, pad=True)
        lines.append(Text.assemble((f"{label:>{LABEL_COLUMNS - 1}} ", "bright_black"), curve, "  ", (figure, style)))
    return lines


def _figures(view: RunView, height: int) -> list[tuple[str, str]]:
    record = view.record
    memory = record.get("memory_bytes", 0) - record.get("memory", {}).get("before", 0)
    plan = view.predicted_memory_bytes
    words = [("", "")]
    if record:
        validation, where = view.validation_loss, f" at {view.validation[-1][0] + 1}" if view.validation else ""
        planned = f" (plan {seconds(view.predicted_step_s)})" if view.predicted_step_s else ""
        mfu = f"  {mfu_in_words(record['mfu'])}" if "mfu" in record else ""  # parameter servers have none
        words = [
            (f"loss {number(record['loss'])}", f"bold {LOSS_STYLE}"),
            ("" if validation is None else f"val  {validation:.3f}{where}", VALIDATION_STYLE),
            (f"{short(record['tokens_per_s'])} tok/s{mfu}", ""),
            (f"{_megabytes(memory)}" + (f" (plan {_megabytes(plan)})" if plan else ""), ""),
            (f"{seconds(record['step_time_s'])} a step{planned}", ""),
            (f"{record['tokens'] / 1e6:,.1f}M tokens", ""),
        ]
    return [*words, *[("", "")] * height][:height]


def _times(view: RunView, width: int) -> list[Text]:
    """Return the parts of a step, measured above predicted, and what the colours mean."""
    measured, predicted = sum(view.parts.values()), sum(view.predicted_parts.values())
    scale, room = max(measured, predicted), width - LABEL_COLUMNS - 10
    if not measured:
        return []
    lines = [_stack("time", view.parts, scale, room)]
    if predicted:
        lines.append(_stack("plan", view.predicted_parts, scale, room))
    legend = Text(" " * LABEL_COLUMNS)
    for part, (name, style) in PART_STYLES.items():
        planned = f" ({seconds(view.predicted_parts[part])})" if predicted and width >= WIDE else ""
        legend.append("■ ", style)
        legend.append(f"{name} {seconds(view.parts.get(part, 0.0))}{planned} ")
    return [*lines, legend]


def _stack(name: str, parts: Mapping[str, float], scale: float, room: int) -> Text:
    row = stacked([(parts.get(part, 0.0), style) for part, (_, style) in PART_STYLES.items()], scale, room)
    return Text.assemble((f" {name:<{LABEL_COLUMNS - 2}} ", "bright_black"), row, f" {seconds(sum(parts.values()))}")


def _ranks(view: RunView, width: int) -> list[Text]:
    """Return a column for each rank, as high as its own work takes long, and the slow ones by name."""
    words, style = _slow(view)
    room = max(1, width - LABEL_COLUMNS - len(words) - 2)
    ranks = sorted(view.ranks)
    if len(ranks) < 2 and not view.standing_s:
        return []
    per_column = -(-len(ranks) // room)
    columns = [max(view.ranks[rank] for rank in ranks[at : at + per_column]) for at in range(0, len(ranks), per_column)]
    top = max(columns, default=0.0)
    return [Text.assemble((" ranks   ", "bright_black"), heights(columns, top), "  ", (words, style))]


def _slow(view: RunView) -> tuple[str, str]:
    if view.standing_s:
        rank, standing_s = max(view.standing_s.items(), key=lambda pair: pair[1])
        others = f" and {len(view.standing_s) - 1} more" if len(view.standing_s) > 1 else ""
        return f"rank {rank}{others}: no progress for {standing_s:.0f} s", "red"
    if len(view.ranks) < 2:
        return "", ""
    median = statistics.median(view.ranks.values())
    rank, slowest = max(view.ranks.items(), key=lambda pair: pair[1])
    if median and slowest >= NAMED_IF_SLOWER * median:
        return f"rank {rank} is slow: {slowest / median - 1:.0%} above the median", "yellow"
    return f"own work {seconds(median)}, the slowest {seconds(slowest)}", "bright_black"


def _stops(view: RunView, width: int, most: int) -> list[Text]:
    """Return the stops, as many components to a line as have room."""
    lines: list[Text] = []
    for words, style in view.stops:
        if lines and lines[-1].cell_len + len(words) + 2 <= width:
            lines[-1].append("; ")
        else:
            lines.append(Text(f"{'' if lines else ' stops':<{LABEL_COLUMNS}}", "bright_black"))
        lines[-1].append(words, style)
    return lines[:most]


def _events(view: RunView, count: int) -> list[Text]:
    shown = list(view.events)[-count:]
    names = [" events", *[""] * count]
    return [
        Text.assemble((f"{name:<{LABEL_COLUMNS}}{_clock(at_s)}  ", "bright_black"), (" ".join(words.split()), style))
        for name, (at_s, words, style) in zip(names, shown, strict=False)
    ]


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _megabytes(size: object) -> str:
    value = float(str(size or 0))
    return f"{value / 1e9:.1f} GB" if value >= 10e9 else f"{value / 1e6:,.0f} MB"
