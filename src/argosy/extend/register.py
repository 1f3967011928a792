"""The decorators that mark functions as extensions. Their arguments are read from the file before any of it is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Generic, Literal, TypeVar

from argosy.extend.views import POINTS, Point, Run

Kind = Literal["callback", "metric"]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


@dataclass(frozen=True)
class Registration(Generic[FunctionT]):
    """What a decorator's arguments say; called with the function, it remembers it."""

    kind: Kind
    name: str
    """Empty for a callback: its name is that of its function."""
    arguments: int
    """How many arguments the function takes."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, function: FunctionT) -> FunctionT:
        """Remember `function`, and return it as it is."""
        registered = Registered(self.kind, self.name or function.__name__, function, self.facts)
        _REGISTERED.setdefault(function.__module__, []).append(registered)
        return function


@dataclass(frozen=True)
class Registered:
    """A function that a module has registered."""

    kind: Kind
    name: str
    function: Callable[..., Any]
    facts: Mapping[str, Any]


_REGISTERED: dict[str, list[Registered]] = {}


def registered_by(module: str) -> list[Registered]:
    """Return what the functions of `module` were registered as, in order."""
    return _REGISTERED.get(module, [])


def callback(point: Point, *, strict: bool = False) -> Registration[Callable[[Run], None]]:
    """Call the function with the `Run` at `point` of each step, on every rank.

    If it raises, it is switched off, and the run goes on; with `strict`, the run ends. It may not change weights,
    gradients or random numbers.
    """
    if point not in POINTS:
        raise ValueError(f"there is no point {point!r}; {_near(point, POINTS)}")
    return Registration("callback", "", 1, {"point": point, "strict": _bool("strict", strict)})


def metric(
    name: str, *, reduce: Literal["mean", "sum"] = "mean", strict: bool = False
) -> Registration[Callable[[Run], float]]:
    """Call the function in each step, on every rank, and log the mean (or sum) over ranks of what it returns.

    It is called when gradients are summed, and its numbers travel in the exchange that all ranks make anyway. A rank
    whose number is not finite is left out. If it raises, it is switched off on that rank; with `strict`, the run ends.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce = {reduce!r} must be "mean" or "sum"')
    return Registration("metric", _name(name), 1, {"reduce": reduce, "strict": _bool("strict", strict)})


DECORATORS: dict[str, Callable[..., Registration[Any]]] = {"callback": callback, "metric": metric}
"""The decorators, by their names, which are the kinds."""


def _name(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name; take letters, digits, _ . -, beginning with a letter")
    return name


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r} must be True or False")
    return value


def _near(name: object, names: tuple[str, ...]) -> str:
    near = get_close_matches(str(name), names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
