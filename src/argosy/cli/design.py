"""Sweep devices that do not exist yet, for training and serving: fronts of time, money and energy, and what binds.

A space is a file (docs/design.md): a device's figures, each one value or a list. All combinations are predicted with
the planner's formulas; nothing is run.

Examples:
  argosy design examples/design.toml                     118,656 devices, in about a minute
  argosy design examples/design.toml --json
  argosy design mine.toml --csv points.csv --plots build/plots
  argosy design examples/design-a100-to-b200.toml        what of a speed-up comes from where
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.documents import answer, write_file
from argosy.cli.options import parse
from argosy.errors import UserError
from argosy.observe.terminal import told_if_long


@dataclass(frozen=True)
class Options:
    space: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SPACE.toml")]
    """The file of the space."""
    top: int = 10
    """Number of devices of each front to show."""
    json: bool = False
    """Print everything but the single points as one JSON object."""
    csv: Path | None = None
    """Write every point to this file, a line each, with what binds each matrix multiplication."""
    plots: Path | None = None
    """Write charts as SVG files into this folder."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy design", Options)
    if options.top < 1:
        raise UserError(f"--top {options.top}: must be at least 1.")
    from argosy.config.layers import place_in
    from argosy.config.section import key_of
    from argosy.plan.design.report import as_csv, as_record, design_report, in_words, pictures
    from argosy.plan.design.space import DesignSpace

    space = DesignSpace.load(options.space)
    try:
        with told_if_long("argosy design: sweeping devices"):
            report = design_report(space)
    except UserError as error:  # which begins with a key of the file
        key = key_of(str(error).partition(" ")[0])
        raise UserError(f"{place_in(options.space, key)}{error}") from None
    if options.csv is not None:
        write_file(options.csv, as_csv(report))
    if options.plots is not None:
        try:
            options.plots.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--plots {options.plots}: {error.strerror}. Name a folder that can be written.") from None
        for name, text in pictures(report).items():
            write_file(options.plots / name, text)
    answer(options.json, "design", in_words(report, options.top), as_record(report))
