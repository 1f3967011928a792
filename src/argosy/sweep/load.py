"""A sweep file as a `Sweep` of which every key and value is checked: nothing is started before.

Its parameters say what is drawn for a key of the run, and what that means to the run file.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from argosy.config.idle import idle_keys
from argosy.config.layers import Source, file_layer, new_key, override_layer, run_layer, table_layer
from argosy.config.lines import read_toml
from argosy.config.load import build, load_layers, run_preset
from argosy.config.load import run_file as existing_run_file
from argosy.config.problems import KeyPlace, problem_of, shown, suggestion
from argosy.config.schema import RunConfig
from argosy.config.section import Key, dotted, flatten, key_fields, key_of, nest, sections, value_type
from argosy.errors import ArgosyWarning, UserError, near_names
from argosy.files import expanded
from argosy.plan.search.auto import check_written
from argosy.sweep.config import Range, SweepConfig

Scalar = None | bool | int | float | str


@dataclass(frozen=True)
class SweepParameter:
    """A key of the run, or a table of it, that varies."""

    key: str
    """The key as a user writes it: optimizer.lr."""
    values: tuple[Any, ...] = ()
    """Values of a list; empty for a range."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    whole: bool = False
    """True if it takes whole numbers."""

    @property
    def is_list(self) -> bool:
        """True if it is a list of values, not a range."""
        return bool(self.values)

    @property
    def choices(self) -> tuple[Scalar, ...]:
        """The text for each value of a list in the journal, which takes plain values only: tables as JSON."""
        return tuple(v if isinstance(v, Scalar) else json.dumps(v, sort_keys=True) for v in self.values)

    def value(self, drawn: Scalar) -> Any:
        """Return the value of the run's key for what was drawn."""
        if self.is_list:
            return self.values[self.choices.index(drawn)]
        return int(drawn) if self.whole and isinstance(drawn, int | float) else drawn

    @property
    def ends(self) -> tuple[Any, ...]:
        """All values of a list; of a range its ends."""
        if self.is_list:
            return self.values
        return (self.value(self.low), self.value(self.high))

    @property
    def grid(self) -> tuple[Any, ...] | None:
        """All values that there are, in order, or more than a grid may have; None if there is no end to them."""
        if self.is_list:
            return self.values
        step = self.step or (1.0 if self.whole and not self.log else None)
        return None if step is None else tuple(self._stepped(i, step) for i in range(min(self._count(step), TOO_MANY)))

    @property
    def last(self) -> float:
        """The end of a range, or the last of its steps."""
        return self.high if self.step is None else float(self._stepped(self._count(self.step) - 1, self.step))

    def _count(self, step: float) -> int:
        return math.floor((self.high - self.low) / step + 1e-9) + 1

    def _stepped(self, place: int, step: float) -> Any:
        return self.value(round(self.low + place * step, 12))


Values = Mapping[str, Any]
"""Key of the run -> value, of one trial."""


def combinations(parameters: Sequence[SweepParameter]) -> Iterator[Values]:
    """Yield all combinations of the parameters, which all have a grid; the last key varies fastest."""
    grids = [parameter.grid or () for parameter in parameters]
    for row in itertools.product(*grids):
        yield {parameter.key: value for parameter, value in zip(parameters, row, strict=True)}


def some_combinations(parameters: Sequence[SweepParameter]) -> Iterator[Values]:
    """Yield a few combinations in which each value of a list and each end of a range occurs."""
    most = max(len(parameter.ends) for parameter in parameters)
    for place in range(most):
        yield {p.key: p.ends[place % len(p.ends)] for p in parameters}


def drawn(parameter: SweepParameter, value: Any) -> Scalar:
    """Return what stands for a value of the run's key in the journal."""
    return parameter.choices[parameter.values.index(value)] if parameter.is_list else value


def in_words(values: Values) -> str:
    """Return the values as `key=value`, with the keys' last names."""
    return " ".join(f"{key.rpartition('.')[2]}={short(value)}" for key, value in values.items())


def short(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


NOT_VARIED = {
    "name": "the sweep names its trials",
    "train.pause_at": "the sweep pauses its trials itself",
    "data.prepare": "prepare each variant with `argosy prepare`, and vary data.sources",
    "launch": "it does not change what is learned; set it in the run",
    "extend": "set it in the run",
}
"""Keys of a run that cannot vary, and why."""
LEARNED_METRICS = ("validation_loss", "bits_per_byte", "validation_accuracy", "loss", "reward_accuracy")
SWEEP_METRICS = (*LEARNED_METRICS, "grad_norm", "step_time_s", "tokens_per_s", "mfu", "memory_bytes")
MOSTLY_MAXIMIZED = ("validation_accuracy", "reward_accuracy", "tokens_per_s", "mfu")
METRIC_TABLES = ("user", "tasks", "seconds", "communication", "memory", "experts")
"""Tables in a line of metrics.jsonl."""
MOST_COMBINATIONS = 2_000
TOO_MANY = MOST_COMBINATIONS + 1
DEFAULT_TRIALS = 20
RANGE_KEYS = frozenset(Range.model_fields)


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked."""

    path: Path
    config: SweepConfig
    base: RunConfig
    """The run that is varied."""
    parameters: tuple[SweepParameter, ...]
    places: Mapping[str, str]
    """Key of a parameter -> where it is written, for messages."""

    @property
    def trials(self) -> int:
        """Number of trials that are asked for; of a grid, its size. That of hyperband follows from its brackets."""
        if self.config.method == "grid":
            return len(self.grid)
        return self.config.trials or DEFAULT_TRIALS

    @cached_property
    def grid(self) -> list[Values]:
        """All combinations, for method = "grid"."""
        return list(itertools.islice(combinations(self.parameters), TOO_MANY))

    def run_of(self, values: Values, **fixed: object) -> RunConfig:
        """Return the run with these values; fixed: other keys of it, with __ for the dot. Raises: UserError."""
        others = {name.replace("__", "."): value for name, value in fixed.items()}
        where = " and ".join(dict.fromkeys(self.places[key].rstrip(": ") for key in values))
        return vary(self.base, {**values, **others}, f"{where}: {in_words(values)}: ")


def vary(base: RunConfig, values: Values, mark: str) -> RunConfig:
    """Return `base` with these values of dotted keys. `mark` begins messages. Raises: UserError."""
    folder = Path.cwd()
    of_base = run_layer(flatten(base.model_dump(mode="json", exclude_none=True), RunConfig), Source(""), folder)
    return load_layers(of_base, override_layer(values, mark), folder)


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises: UserError that names what is wrong in it, or in the run that it names."""
    if not path.is_file():
        raise UserError(f"{path}: there is no such sweep file. docs/sweeps.md shows one.")
    table, lines = read_toml(path)
    inline = table.pop("run", None) if isinstance(table.get("run"), dict) else None
    given, where = _parameter_tables(table, lines, path)
    if "parameters" in table:
        table["parameters"] = given
    table.setdefault("name", path.stem)
    config = build(SweepConfig, table_layer(table, SweepConfig, Source(str(path), where)))
    base = _base(path, config, inline, lines)
    if base.launch.nodes > 1:
        raise UserError(f"{path}: launch.nodes = {base.launch.nodes} in its run, and a trial is on one. Leave it out.")
    if base.sites:
        raise UserError(f"{path}: its run has [[sites]], and a trial has metrics of its own. Leave them out.")
    source = Source(str(path), where)
    places = {name: source.place(("parameters", name)).text for name in config.parameters}
    if not config.parameters:
        raise UserError(f"{path}: nothing varies. Add [parameters] with a key, such as optimizer.lr = [1e-3, 3e-3].")
    parameters = tuple(_parameter(name, range_, places[name]) for name, range_ in config.parameters.items())
    sweep = Sweep(path, config, base, parameters, places)
    _check_metric(sweep, source)
    _check_method(sweep, source)
    _check_combinations(sweep)
    _warn_of_idle_parameters(sweep)
    return sweep


def _base(path: Path, config: SweepConfig, inline: dict[str, Any] | None, lines: Mapping[Key, int]) -> RunConfig:
    folder = path.absolute().parent
    if inline is not None:
        source = Source(str(path), {key[1:]: line for key, line in lines.items() if key[0] == "run"})
        return load_layers(run_layer(flatten(inline, RunConfig), source, folder), {}, folder)
    if not config.run:
        raise UserError(
            f'{path}: run is missing: the run that is varied. Give run = "run.toml", or a table [run] with its keys.'
        )
    if preset := run_preset(config.run):
        return load_layers(file_layer(preset, preset.name, Path.cwd()), {}, Path.cwd())
    try:
        file = existing_run_file(str(folder / expanded(config.run)))
    except UserError as error:
        raise UserError(f"{path}:{lines.get(('run',), 1)}: run = {shown(config.run)}: {error}") from None
    return load_layers(file_layer(file, str(file), file.absolute().parent), {}, file.absolute().parent)


def _parameter_tables(
    table: dict[str, Any], lines: Mapping[Key, int], path: Path
) -> tuple[dict[str, Any], dict[Key, int]]:
    """Return the parameters by dotted key, each as a table, and the lines of all keys under these names.

    TOML lets `optimizer.lr = [...]` be a table in a table, and "optimizer.lr" = [...] one key: both mean the same.
    """
    found: dict[str, Any] = {}
    where: dict[Key, int] = {key: line for key, line in lines.items() if key[:1] not in (("parameters",), ("run",))}
    given = table.get("parameters")
    if not isinstance(given, dict):
        return found, {**where, **({("parameters",): lines[("parameters",)]} if given is not None else {})}
    where[("parameters",)] = lines.get(("parameters",), 1)
    for written, value in _leaves(given):
        place = Source(str(path), lines).place(("parameters", *written))
        key = new_key(key_of(".".join(written)), place.text)
        name = dotted(key)
        if name in found:
            raise UserError(f"{place.text}{name} is varied twice. Remove one of them.")
        found[name] = {"values": value} if isinstance(value, list) else value
        where[("parameters", name)] = place.line
        under = ("parameters", *written)
        where |= {("parameters", name, *k[len(under) :]): n for k, n in lines.items() if k[: len(under)] == under}
    return found, where


def _leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the names of each parameter and what it is varied over."""
    for name, value in table.items():
        names = (*above, name)
        is_table = isinstance(value, dict) and key_of(".".join(names)) not in key_fields(RunConfig)
        if is_table and value and not RANGE_KEYS & value.keys():
            yield from _leaves(value, names)
        else:
            yield names, value


def _parameter(name: str, given: Range, place: str) -> SweepParameter:
    """Return a parameter of the run's schema. Raises: UserError for a key or a value that no run can have."""
    key = key_of(name)
    is_table = key in sections(RunConfig) and key != ()
    if key not in key_fields(RunConfig) and not is_table:
        raise UserError(f"{place}{name}: unknown key of a run; {suggestion(key, key_fields(RunConfig))}")
    for prefix, why in NOT_VARIED.items():
        if name == prefix or name.startswith(f"{prefix}."):
            raise UserError(f"{place}{name} cannot vary: {why}.")
    parameter = _of_list(name, given, place) if given.values is not None else _of_range(name, given, place, is_table)
    for value in parameter.ends:
        _check_value(key, value, place)
    return parameter


def _of_list(name: str, given: Range, place: str) -> SweepParameter:
    kind = value_type(key_fields(RunConfig)[key_of(name)]) if key_of(name) in key_fields(RunConfig) else None
    values = tuple(_like(value, kind) for value in given.values or ())
    for at, value in enumerate(values):
        if value in values[:at]:
            raise UserError(f"{place}{name}: the value {shown(value)} is given twice. Remove one of them.")
    return SweepParameter(name, values)


def _like(value: Any, kind: Any) -> Any:
    """1 is a number where a key takes 1.0, and 1e3 a whole one where it takes 1000."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def _of_range(name: str, given: Range, place: str, is_table: bool) -> SweepParameter:
    assert given.min is not None and given.max is not None  # the schema has seen to it
    kind = None if is_table else value_type(key_fields(RunConfig)[key_of(name)])
    if kind not in (int, float):
        raise UserError(f"{place}{name} takes no numbers, so it has no range. Give a list of values.")
    whole = kind is int or given.int
    for limit in ("min", "max", "step"):
        number = getattr(given, limit)
        if whole and number is not None and not number.is_integer():
            raise UserError(f"{place}{name}: {limit} = {number:g} is no whole number. Try {max(1, round(number))}.")
    return SweepParameter(name, (), given.min, given.max, given.log, given.step, whole)


def _check_value(key: Key, value: Any, place: str) -> None:
    """Raise UserError unless a run may have this value, whatever the other keys say."""
    is_table = isinstance(value, dict) and key not in key_fields(RunConfig)
    of_key = flatten(value, RunConfig, key) if is_table else {key: value}
    try:
        RunConfig.model_validate_json(json.dumps(nest(of_key), default=str), strict=True)
    except ValidationError as error:
        problems = [problem_of(e, RunConfig, lambda _: KeyPlace(place)) for e in error.errors()]
        if wrong := [str(problem) for problem in problems if not problem.is_rule]:
            raise UserError("\n".join(wrong)) from None


def _check_metric(sweep: Sweep, source: Source) -> None:
    metric, base, place = sweep.config.metric, sweep.base, source.place(("metric",)).text
    own = [f"user.{name}" for name in base.extend.declared("metric")]
    known = metric in SWEEP_METRICS or metric.partition(".")[0] in METRIC_TABLES or metric in own
    if not known:
        raise UserError(f"{place}metric = {shown(metric)}: unknown; {near_names(metric, [*SWEEP_METRICS, *own])}")
    if "direction" not in sweep.config.model_fields_set and (metric in MOSTLY_MAXIMIZED or metric.startswith("tasks.")):
        raise UserError(f'{place}metric = {shown(metric)}: say direction = "maximize", or "minimize" if less is best.')
    if metric in SWEEP_METRICS and metric not in LEARNED_METRICS and sweep.config.method in ("halving", "hyperband"):
        raise UserError(
            f"{place}metric = {shown(metric)} is not learned, so {sweep.config.method} has nothing to judge early. "
            'Take method = "grid" or "random".'
        )


def _check_method(sweep: Sweep, source: Source) -> None:
    config, method = sweep.config, sweep.config.method

    def refuse(key: str, text: str) -> UserError:
        return UserError(f"{source.place(tuple(key.split('.'))).text}{text}")

    if method == "grid":
        for parameter in sweep.parameters:
            if parameter.grid is None:
                raise UserError(
                    f"{sweep.places[parameter.key]}{parameter.key} has no end of values, and a grid takes all of them. "
                    "Give values, or a step."
                )
        if len(sweep.grid) > MOST_COMBINATIONS:
            raise refuse("method", f"the grid has more than {MOST_COMBINATIONS:,} combinations. Try random or tpe.")
    if method in ("grid", "hyperband") and config.trials:
        raise refuse("trials", f"trials = {config.trials}: {method} knows its trials itself. Leave it out.")
    if method not in ("halving", "hyperband"):
        if config.halving != type(config.halving)():
            raise refuse("halving", f'[halving] has no effect with method = "{method}". Leave it out.')
        return
    steps = sweep.base.train.steps
    varied = {parameter.key for parameter in sweep.parameters}
    if not steps or varied & {"train.steps", "train.minutes", "train.epochs", "train"}:
        raise refuse(
            "method",
            f'method = "{method}" compares trials after as many steps as each other, so train.steps must be set in '
            "the run and must not vary. Set it, or take another method.",
        )
    if config.halving.min_steps >= steps:
        raise refuse(
            "halving.min_steps",
            f"halving.min_steps = {config.halving.min_steps} is no less than train.steps = {steps}. "
            f"Try {max(1, steps // config.halving.eta**2)}.",
        )


def _check_combinations(sweep: Sweep) -> None:
    """Raise UserError if the keys of a combination do not go together: of any in a grid, else of all that are tried."""
    if sweep.config.method == "grid":
        for values in sweep.grid:
            check_run(sweep.run_of(values), sweep.places[next(iter(values))])
        return
    first: UserError | None = None
    for values in some_combinations(sweep.parameters):
        try:
            check_run(sweep.run_of(values), sweep.places[next(iter(values))])
            return
        except UserError as error:
            first = first or error
    if first is not None:
        raise first


def _warn_of_idle_parameters(sweep: Sweep) -> None:
    """Warn of each parameter that none of a few combinations reads: trials that differ in it alone are the same."""
    found = []
    for values in some_combinations(sweep.parameters):
        with suppress(UserError):  # keys that do not go together, beside others that do
            found.append({key: sentence for key, _, sentence in idle_keys(sweep.run_of(values))})
    for key, place in sweep.places.items():
        if found and all(key in idle for idle in found):
            warnings.warn(f"{place}{found[0][key]}", ArgosyWarning, stacklevel=1)


def check_run(run: RunConfig, place: str) -> None:
    """Raise UserError if the run's plan, if one is written, cannot train it."""
    try:
        check_written(run)
    except UserError as error:
        raise UserError(f"{place}{error}") from None
