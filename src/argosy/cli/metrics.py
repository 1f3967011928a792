"""Print a run's metrics by step, as CSV, JSON lines or Parquet: for a notebook, a spreadsheet or a script.

Steps are counted from 0. What a step did not measure, or was not finite, is empty (JSON: null).

Examples:
  argosy metrics runs/demo                                        the keys that there are
  argosy metrics runs/demo --columns step,loss,lr --every 10      CSV
  argosy metrics runs/demo --columns step,loss --from 1000 --format json
  argosy metrics runs/demo --columns step,validation_loss         evaluations, at their steps
  argosy metrics runs/demo --columns all --format parquet --out demo.parquet
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from argosy.cli.documents import lines_of, write
from argosy.cli.options import parse
from argosy.errors import ArgosyWarning, UserError, missing_extra
from argosy.files import atomic_write


@dataclass(frozen=True)
class Options:
    """Options of `argosy metrics`."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder."""
    columns: str = ""
    """Keys, separated by commas, or `all`; without it, the keys that there are are listed."""
    every: int = 1
    """Print every so many steps."""
    from_step: Annotated[int, tyro.conf.arg(name="from")] = 0
    """First step."""
    to_step: Annotated[int | None, tyro.conf.arg(name="to")] = None
    """Last step."""
    format: Literal["csv", "json", "parquet"] = "csv"
    """csv, json (an object a line) or parquet, which needs --out."""
    out: Path | None = None
    """A file to write, instead of printing."""
    json: bool = False
    """The same as --format json; without --columns, a list of the keys."""


StepRow: TypeAlias = dict[str, float | None]
"""A step's numbers by column; null for what it did not measure, or was not finite."""


@dataclass(frozen=True)
class MetricsKeys:
    """The columns that a run has."""

    keys: list[str]


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy metrics", Options)
    form = "json" if options.json else options.format
    if options.every < 1:
        raise UserError(f"--every = {options.every}: at least 1 is needed, such as --every 10.")
    if form == "parquet" and options.out is None:
        raise UserError("--format parquet: a binary file, which is not printed. Name one: --out metrics.parquet")
    from argosy.watch.columns import STEP
    from argosy.watch.query import table_of_steps
    from argosy.watch.reader import RunReader

    warnings.simplefilter("ignore", ArgosyWarning)  # of an old run.toml: it is the run that is asked to change it
    reader = RunReader(options.run)
    reader.refresh()
    names = [name.strip() for name in options.columns.split(",") if name.strip()]
    if not names:
        keys = [STEP, *(key for key in sorted({*reader.keys(), *reader.evaluations.keys()}) if key != STEP)]
        if form == "json":
            write("metrics-keys", MetricsKeys(keys))
        else:
            print("\n".join(keys))
        return
    table = table_of_steps(reader, names, options.from_step, options.to_step, options.every)
    if form == "parquet":
        _write_parquet(options.out or Path(), table)
    elif options.out is None and form == "json":
        write("metrics", *_rows(table))
    else:
        text = io.StringIO(newline="")
        if form == "json":
            text.writelines(f"{line}\n" for line in lines_of("metrics", *_rows(table)))
        else:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))
        if options.out is None:
            print(text.getvalue(), end="")
            return
        with atomic_write(options.out) as file:
            file.write(text.getvalue().encode())


def _rows(table: dict[str, list[Any]]) -> Iterator[StepRow]:
    for row in zip(*table.values(), strict=True):
        yield dict(zip(table, row, strict=True))


def _write_parquet(path: Path, table: dict[str, list[Any]]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", "argosy metrics --format parquet") from None
    with atomic_write(path) as file:
        pyarrow.parquet.write_table(pyarrow.table(table), file)
