"""The table of sinks, and the checks of a run's."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from difflib import get_close_matches

from argosy.config.extend import ExtendConfig
from argosy.config.observe import ObserveConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError, missing_extra
from argosy.extend.declared import CodeFile
from argosy.extend.loading import find
from argosy.sinks.sink import Sink


@dataclass(frozen=True)
class SinkEntry:
    """A sink by name: it is imported in its own process alone, since its package may be heavy or broken."""

    module: str
    kind: str
    """The class's name."""
    package: str = ""
    """The package that it needs; empty: none."""
    extra: str = ""
    """The extra of Argosy that installs that."""

    def load(self) -> type[Sink]:
        found: type[Sink] = getattr(importlib.import_module(self.module), self.kind)
        return found


SINKS = {
    "tensorboard": SinkEntry("argosy.sinks.tensorboard", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": SinkEntry("argosy.sinks.wandb", "Wandb", "wandb", "wandb"),
    "mlflow": SinkEntry("argosy.sinks.mlflow", "Mlflow", "mlflow", "mlflow"),
    "trackio": SinkEntry("argosy.sinks.trackio", "Trackio", "trackio", "trackio"),
    "opentelemetry": SinkEntry("argosy.sinks.opentelemetry", "OpenTelemetry", "opentelemetry.sdk", "opentelemetry"),
    "prometheus": SinkEntry("argosy.sinks.prometheus", "Prometheus"),
}
OF_A_RUN = {
    "alerts": SinkEntry("argosy.sinks.alerting", "Alerting"),
    "samples": SinkEntry("argosy.inference.sampler", "Sampler"),
}
"""Parts of a run by other keys, held like its sinks."""
OF_A_RUN_BY = {"alerts": "alerts", "samples": "sample_every_steps"}
"""The keys of `observe`."""


def parts_of(run: RunConfig) -> tuple[str, ...]:
    """Return the names of all that a run's follower holds; none: the run needs no follower."""
    alerts = ("alerts",) if run.observe.alerts.are_delivered else ()
    samples = ("samples",) if run.observe.sample_every_steps else ()
    return (*run.observe.sinks, *alerts, *samples)


def file_name_of(name: str) -> str:
    """Return the name of a sink, or "module:Class", as names of files have it."""
    return name.replace(":", ".").replace("/", ".")


@dataclass(frozen=True)
class UserSink(SinkEntry):
    """A sink of the user's, declared in a file that the run names."""

    name: str = ""
    code: tuple[CodeFile, ...] = ()

    def load(self) -> type[Sink]:
        """Import the user's file. Raises: UserError."""
        found = find(self.code, "sink", self.name)
        if not issubclass(found.function, Sink):  # type: ignore[arg-type]
            raise UserError(
                f"{found.declared.place}: the {found.declared} must be a subclass of argosy.sinks.sink.Sink"
            )
        return found.function  # type: ignore[return-value]


def entry_of(name: str, extend: ExtendConfig) -> SinkEntry:
    """Return the sink of this name: one of `SINKS`, of `OF_A_RUN`, or your own, declared or as "module:Class".

    Raises: UserError if there is none.
    """
    module, colon, kind = name.partition(":")
    if name in SINKS | OF_A_RUN:
        return (SINKS | OF_A_RUN)[name]
    if name in extend.declared("sink"):
        return UserSink("argosy", name, name=name, code=extend.code)
    if colon and module and kind:
        return SinkEntry(module, kind)
    near = get_close_matches(name, [*SINKS, *extend.declared("sink")], 1)
    hint = f"did you mean {near[0]!r}?" if near else f'choose from {", ".join(SINKS)}, or name a class: "module:Class".'
    raise UserError(f"observe.sinks: there is no sink {name!r}; {hint}")


def check_sinks(observe: ObserveConfig, extend: ExtendConfig = ExtendConfig()) -> None:  # noqa: B008  (frozen)
    """Check, before anything is trained, that the sinks of a run are known, and that their packages are there.

    Raises: UserError.
    """
    for name in observe.sinks:
        if name in OF_A_RUN:
            raise UserError(f"observe.sinks: {name!r} is no sink; observe.{OF_A_RUN_BY[name]} asks for it.")
        if name in SINKS and (own := extend.declared("sink").get(name)) is not None:
            raise UserError(f"{own.place}: there is a built-in sink {name!r}; give yours another name.")
        entry = entry_of(name, extend)
        package = entry.package or entry.module.partition(".")[0]
        if is_installed(package):
            continue
        if entry.extra:
            raise missing_extra(package, entry.extra, f"observe.sinks: the sink {name!r}")
        raise UserError(f"observe.sinks: {name!r} cannot be imported: there is no module {package!r}.")
    if len(set(observe.sinks)) < len(observe.sinks):
        raise UserError(f"observe.sinks names a sink twice: {', '.join(observe.sinks)}. Name each once.")
    if "prometheus" in observe.sinks:
        from argosy.sinks.prometheus import token_for

        token_for(observe.prometheus.host)


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it
        return False
