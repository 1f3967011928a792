"""Print a run's metrics by step, as CSV, JSON lines or Parquet: for a notebook, a spreadsheet or a script.

Steps are counted from 0. What a step did not measure, or was not finite, is empty (JSON: null).

Examples:
  argosy metrics runs/demo                                        the keys that there are
  argosy metrics runs/demo --columns step,loss,lr --every 10      CSV
  argosy metrics runs/demo --columns step,loss --from 1000 --json
  argosy metrics runs/demo --columns step,validation_loss         evaluations, at their steps
  argosy metrics runs/demo --columns all --format parquet --out demo.parquet
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro

from argosy.cli.documents import WrittenFile, answer, lines_of, write, write_file
from argosy.cli.options import RunPath, parse, read_run
from argosy.errors import UserError, imported
from argosy.observe.terminal import printable


@dataclass(frozen=True)
class Options:
    run: RunPath
    columns: str = ""
    """Keys, separated by commas, or `all`; without it, the keys that there are are listed."""
    every: int = 1
    """Print one step in this many: with 10, the steps 9, 19, ..., after which runs evaluate."""
    from_step: Annotated[int, tyro.conf.arg(name="from")] = 0
    """First step."""
    to_step: Annotated[int | None, tyro.conf.arg(name="to")] = None
    """Last step."""
    format: Literal["csv", "json", "parquet"] | None = None
    """csv, json (an object a line) or parquet, which needs --out. Not given: csv; with --json, json."""
    out: Path | None = None
    """A file to write the table to, instead of printing it."""
    json: bool = False
    """Print JSON, as every command does: the table, the list of keys, or with --out the file's name; errors too."""


StepRow: TypeAlias = dict[str, float | None]
"""A step's numbers by column; null for what it did not measure, or was not finite."""


@dataclass(frozen=True)
class MetricsKeys:
    """The columns that a run has."""

    keys: list[str]


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy metrics", Options)
    form = options.format or ("json" if options.json else "csv")
    if options.every < 1:
        raise UserError(f"--every = {options.every}: at least 1 is needed, such as --every 10.")
    if form == "parquet" and options.out is None:
        raise UserError("--format parquet: a binary file, which is not printed. Name one: --out metrics.parquet")
    if options.json and options.out is None and form != "json":
        raise UserError(
            f"--format {form}: with --json, JSON is printed. Leave one out, or name a file: --out metrics.csv"
        )
    from argosy.watch.library import keys_of_steps, table_of_steps

    reader = read_run(options.run)
    names = [name.strip() for name in options.columns.split(",") if name.strip()]
    if not names:
        keys = keys_of_steps(reader)
        answer(form == "json", "metrics-keys", "\n".join(keys), MetricsKeys(keys))
        return
    table = table_of_steps(reader, names, options.from_step, options.to_step, options.every)
    if options.out is not None:
        write_file(options.out, _parquet_of(table) if form == "parquet" else _text_of(table, form), "--out")
        if options.json:
            write("metrics-out", WrittenFile(str(options.out)))
    elif form == "json":
        write("metrics", *_rows(table))
    else:
        print(printable(_text_of(table, form)), end="")


def _text_of(table: dict[str, list[Any]], form: str) -> str:
    if form == "json":
        return "".join(f"{line}\n" for line in lines_of("metrics", *_rows(table)))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return text.getvalue()


def _rows(table: dict[str, list[Any]]) -> Iterator[StepRow]:
    for row in zip(*table.values(), strict=True):
        yield dict(zip(table, row, strict=True))


def _parquet_of(table: dict[str, list[Any]]) -> bytes:
    modules = ("pyarrow", "pyarrow.parquet")
    pyarrow, parquet = (imported(name, "parquet", "argosy metrics --format parquet") for name in modules)
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(table), file)
    return file.getvalue()
