"""Results of runs (size, tokens and loss of each) from run folders and CSV files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from argosy.config.load import load
from argosy.data.manifest import TOKENIZER
from argosy.errors import UserError, near_names
from argosy.files import file_sha256
from argosy.observe.events import from_the_end
from argosy.plan.parameters import active_parameters
from argosy.plan.scaling_law import RunResult
from argosy.sync.layout import site_folder

SWEEP_FILE = "sweep.toml"
"""A folder with this file is that of a sweep; its folders are its trials."""


def read_results(paths: Sequence[Path]) -> list[RunResult]:
    """Read the results in run folders (`read_run`), folders of sweeps (`read_sweep`) and CSV files (`read_csv`).

    Raises: UserError if one cannot be read, or if the runs have different tokenizers, since their losses per token
    cannot be compared.
    """
    folders = [path for path in paths if path.is_dir()]
    _check_same_tokenizer([run for folder in folders for run in (trials_in(folder) or [folder])])
    return [result for path in paths for result in _read(path)]


def _read(path: Path) -> list[RunResult]:
    if not path.is_dir():
        return list(read_csv(path))
    return read_sweep(path) if (path / SWEEP_FILE).exists() else [read_run(path)]


def trials_in(folder: Path) -> list[Path]:
    """Return the run folders of a sweep's trials that have begun, by number; none if `folder` is not a sweep's."""
    if not (folder / SWEEP_FILE).exists():
        return []
    return sorted(path.parent for path in folder.glob("[0-9]*/run.toml"))


def read_sweep(folder: Path) -> list[RunResult]:
    """Return the results of a sweep's trials that have come to their end: of those with the same size and the same
    number of tokens the best, since the law is about runs whose other settings are right.

    Raises: UserError if there is none.
    """
    best: dict[tuple[float, float], RunResult] = {}
    why = "none has begun. Let the sweep end, or give other runs."
    for run_dir in trials_in(folder):
        try:
            result = read_run(run_dir)
        except UserError as problem:  # it has failed, or was not promoted
            why = str(problem)
            continue
        size = result.parameters, result.tokens
        best[size] = min(result, best.get(size, result), key=lambda found: found.loss)
    if not best:
        raise UserError(f"{folder}: no trial of this sweep has come to its end with a result: {why}")
    return list(best.values())


def read_run(run_dir: Path) -> RunResult:
    """Return the result of a finished run: its last loss on held-out text. Raises: UserError."""
    if not (run_dir / "run.toml").exists():
        raise UserError(f"{run_dir}: not a run's folder, it has no run.toml. Give folders such as runs/NAME, or a CSV.")
    run = load(run_dir / "run.toml")
    if run.train.has_preferences:
        raise UserError(
            f"{run_dir}: it learns from preferences (train.objective = {run.train.objective}), and the law is about "
            "the loss of tokens. Give runs that learn text or answers."
        )
    path = run_dir / "metrics.jsonl"
    if run.sites and not run.site and not path.exists():
        one = site_folder(run_dir, run.sites[0].name)
        raise UserError(f"{run_dir}: each of its sites has losses of its own. Name one, such as {one}.")
    done = next((record["step"] + 1 for record in from_the_end(path)), 0)
    if not run.train.steps or done < run.train.steps:
        raise UserError(
            f"{run_dir}: at step {done} of {run.train.steps or '?'}, and losses can be compared only when the learning "
            f"rate has come down. Finish it: argosy train {run_dir / 'run.toml'} --run-dir {run_dir}"
        )
    evaluated = (record for record in from_the_end(path) if "validation_loss" in record)
    loss = next(evaluated, {}).get("validation_loss")
    if loss is None:
        raise UserError(
            f"{run_dir}: it has no loss on held-out text. Prepare the data with validation_fraction above 0, or give "
            "the losses as a CSV."
        )
    return RunResult(active_parameters(run.model), run.tokens_before(done), loss)


def planned_size(source: Path) -> tuple[int, int]:
    """Return N and D, as in `RunResult`, of a run file. Raises: UserError if it leaves one open."""
    run = load(source)
    for key, value, remedy in (
        ("train.steps", run.train.steps, "the steps that it is to train"),
        ("model.vocab_size", run.model.vocab_size, "the vocabulary of the tokenizer that the results share"),
    ):
        if not value:
            raise UserError(f"{source}: {key} = 0, and the size of the run depends on it. Say {remedy}.")
    return active_parameters(run.model), run.tokens_before(run.train.steps)


def read_csv(path: Path) -> list[RunResult]:
    """Read a CSV with the columns parameters, tokens, loss, in any order. Raises: UserError."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            columns = [name.strip() for name in next(reader, [])]
            _check_columns(path, columns)
            return list(_rows(path, columns, reader))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise UserError(
            f"{path}: cannot be read as a CSV ({problem}). Give run folders or a CSV with a header."
        ) from None


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    known = [f.name for f in fields(RunResult)]
    for name in columns:
        if name not in known:
            raise UserError(f"{path}:1: unknown column {name!r}; {near_names(name, known)}")
    if sorted(columns) != sorted(known):
        lacking = ", ".join(name for name in known if name not in columns)
        wrong = f"column {lacking} is missing" if lacking else "a column is named twice"
        raise UserError(f"{path}:1: {wrong}; the header is {','.join(known)}, in any order.")


def _rows(path: Path, columns: Sequence[str], reader: Iterable[list[str]]) -> Iterator[RunResult]:
    for line, row in enumerate(reader, start=2):
        if not row:
            continue
        if len(row) != len(columns):
            raise UserError(f"{path}:{line}: {len(row)} values for the {len(columns)} columns {','.join(columns)}.")
        cells = dict(zip(columns, row, strict=True))
        yield RunResult(**{name: _number(text, f"{path}:{line}: {name}") for name, text in cells.items()})


def _number(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UserError(f"{where} = {text!r}: must be a finite number above 0, e.g. 24e6 or 3.21.")
    return number


def _check_same_tokenizer(run_dirs: Sequence[Path]) -> None:
    first: tuple[Path, str] | None = None
    for run_dir in run_dirs:
        if not (run_dir / TOKENIZER).exists():
            continue
        digest = file_sha256(run_dir / TOKENIZER)
        first = first or (run_dir, digest)
        if digest != first[1]:
            raise UserError(
                f"{first[0]} and {run_dir} have different tokenizers, so their losses per token cannot be compared. "
                "Prepare the data of all runs with one tokenizer: argosy prepare --tokenizer."
            )
