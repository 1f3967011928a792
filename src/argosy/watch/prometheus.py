"""Runs as Prometheus reads them: the text exposition format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/; names and units as
https://prometheus.io/docs/practices/naming/ asks: base units in the name, `_total` for what only grows, ratios 0 to 1.
What a recovery takes back, such as the step, is a gauge.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from argosy.watch.nodes import in_newest_world
from argosy.watch.timeline import State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RUN_STATES = get_args(State)


@dataclass
class LatestFacts:
    """The newest facts of one run, as its files have them."""

    run: str
    """Its name: the label `run` of all that is said of it."""
    plan: str = ""
    model: str = ""
    steps: int | None = None
    """Steps that it is to make; None: not known yet."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """The newest line of a step."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """The newest line of an evaluation."""
    nodes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Node -> its newest line."""
    events: Counter[str] = field(default_factory=Counter)
    """Kind of event -> how often it came."""
    state: str = "training"
    """One of `RUN_STATES`."""


METRICS: dict[str, tuple[str, str, str]] = {
    "argosy_run_info": ("", "", "1; the labels say what the run is."),
    "argosy_run_state": ("", "", "1 for the state that the run is in."),
    "argosy_steps_done": ("", "", "Steps done; a recovery may take some back."),
    "argosy_steps_planned": ("", "", "Steps that the run is to make."),
    "argosy_trained_tokens": ("step", "tokens", "Tokens trained on; a recovery may take some back."),
    "argosy_loss": (
        "step",
        "loss",
        "Training loss of the newest step: nats per token, or the mean over pairs or answers.",
    ),
    "argosy_gradient_norm": ("step", "grad_norm", "Norm of the newest gradient, before clipping."),
    "argosy_learning_rate": ("step", "lr", "Learning rate of the newest step."),
    "argosy_validation_loss": ("evaluation", "validation_loss", "Loss on held-out text, nats per token, or per pair."),
    "argosy_validation_bpb": ("evaluation", "bits_per_byte", "Bits per byte of held-out text."),
    "argosy_validation_accuracy_ratio": (
        "evaluation",
        "validation_accuracy",
        "Share of held-out pairs that a reward model tells apart.",
    ),
    "argosy_step_seconds": ("step", "step_time_s", "Duration of the newest step."),
    "argosy_step_part_seconds": ("table", "seconds", "Where the time of the newest step went, of the first rank."),
    "argosy_tokens_per_second": ("step", "tokens_per_s", "Tokens per second of the newest step."),
    "argosy_mfu_ratio": ("step", "mfu", "Model FLOPs utilization of the newest step."),
    "argosy_memory_bytes": ("step", "memory_bytes", "Peak memory of the first rank."),
    "argosy_memory_part_bytes": ("table", "memory", "What the memory of the first rank is taken by."),
    "argosy_communication_seconds": ("", "", "Time in collectives in the newest step, of the first rank."),
    "argosy_communication_bytes": ("", "", "Bytes that the first rank sent in the newest step."),
    "argosy_sync_ratio": ("sync", "ratio", "Bytes sent between replicas or sites, over those of exact fp32 sums."),
    "argosy_sync_staleness_steps": ("sync", "staleness", "Steps since replicas or sites had agreed on the values."),
    "argosy_sync_distance": ("sync", "distance", "How far replicas were from each other before they agreed."),
    "argosy_last_step_timestamp_seconds": ("step", "time_s", "When the newest step was written down, since 1970."),
    "argosy_user_metric": ("table", "user", "What the user's code logged."),
    "argosy_events_total": ("", "", "Events of the run, by kind."),
    "argosy_rank_step_seconds": ("rank", "step_s", "Duration of a step of a rank, mean of the newest seconds."),
    "argosy_rank_memory_bytes": ("rank", "memory_bytes", "Peak memory of a rank."),
    "argosy_device_utilization_ratio": ("device", "utilisation", "Utilization of a device."),
    "argosy_device_memory_bytes": ("device", "memory_bytes", "Memory of a device that is used."),
    "argosy_device_temperature_celsius": ("device", "temperature_c", "Temperature of a device."),
    "argosy_device_power_watts": ("device", "power_w", "Power that a device takes."),
    "argosy_device_clock_hertz": ("device", "clock_mhz", "Clock of a device."),
    "argosy_host_cpu_ratio": ("host", "cpu", "Utilization of a node's processors."),
    "argosy_host_memory_used_bytes": ("host", "memory_used_bytes", "Memory of a node that is used."),
    "argosy_host_disk_free_bytes": ("host", "disk_free_bytes", "What is left of the disk that holds the run."),
    "argosy_node_energy_joules_total": ("", "", "Energy that a node has used for the run."),
}
"""Name -> the record that has its value (empty: computed below), the key there, and help; in the order of the text. A
name that ends in `_total` is a counter, any other a gauge."""
METRIC_HELP = {name: about for name, (_, _, about) in METRICS.items()}

MOST_EACH = 64
"""A name has at most so many samples of nodes, devices or ranks of a run; of more, least, mean and most."""

Sample = tuple[str, dict[str, str], Any]
"""Name, labels, value."""


def exposition(runs: Iterable[LatestFacts]) -> str:
    """Return the metrics of `runs` as text, each name's samples together; what is not known is left out."""
    by_name: dict[str, list[str]] = {name: [] for name in METRIC_HELP}
    for run in runs:
        for name, labels, value in _samples(run):
            if isinstance(value, int | float) and not math.isnan(value):
                by_name[name].append(f"{name}{_labels({'run': run.run, **labels})} {_number(value)}")
    lines: list[str] = []
    for name, samples in by_name.items():
        if samples:
            lines += [f"# HELP {name} {METRIC_HELP[name]}", f"# TYPE {name} {kind_of(name)}", *samples]
    return "\n".join(lines) + "\n"


def kind_of(name: str) -> str:
    """Return the type of one of `METRIC_HELP`, in Prometheus' words."""
    return "counter" if name.endswith("_total") else "gauge"


def _in(record: str) -> list[tuple[str, str]]:
    """Return (name, key) of the metrics of one kind of record."""
    return [(name, key) for name, (where, key, _) in METRICS.items() if where == record]


def _plain(record: str, values: Mapping[str, Any]) -> Iterator[Sample]:
    yield from ((name, {}, values.get(key)) for name, key in _in(record))


def _samples(run: LatestFacts) -> Iterator[Sample]:
    yield "argosy_run_info", {"plan": run.plan, "model": run.model}, 1
    for state in RUN_STATES:
        yield "argosy_run_state", {"state": state}, int(state == run.state)
    newest = run.step.get("step", -1)
    yield "argosy_steps_done", {}, newest + 1 if isinstance(newest, int | float) else None
    yield "argosy_steps_planned", {}, run.steps
    yield from _plain("step", run.step)
    yield from _plain("evaluation", run.evaluation)
    for name, key in _in("table"):
        for part, value in _table(run.step, key).items():
            yield name, {"name" if key == "user" else "part": part}, value
    communication = _table(run.step, "communication")
    for axis in communication:
        for tier, pair in _table(communication, axis).items():
            if isinstance(pair, Sequence) and len(pair) == 2:
                yield "argosy_communication_seconds", {"axis": axis, "tier": tier}, pair[0]
                yield "argosy_communication_bytes", {"axis": axis, "tier": tier}, pair[1]
    yield from _plain("sync", _table(run.step, "sync"))
    for kind, count in sorted(run.events.items()):
        yield "argosy_events_total", {"event": kind}, count
    of_nodes = [sample for node in in_newest_world(run.nodes) for sample in _of_node(node, run.nodes[node])]
    for node, line in run.nodes.items():  # also what those used that have left
        of_nodes.append(("argosy_node_energy_joules_total", {"node": node}, _table(line, "energy").get("total_joules")))
    yield from _bounded(of_nodes)


def _bounded(samples: list[Sample]) -> Iterator[Sample]:
    """Yield samples of nodes, devices and ranks; of a name with more than MOST_EACH, the least, mean and most."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        if isinstance(sample[2], int | float) and math.isfinite(sample[2]):
            by_name.setdefault(sample[0], []).append(sample)
    for name, each in by_name.items():
        if len(each) <= MOST_EACH:
            yield from each
        else:
            values = [sample[2] for sample in each]
            if name.endswith("_total"):
                yield name, {"statistic": "sum"}, math.fsum(values)
                continue
            for statistic, value in (
                ("min", min(values)),
                ("mean", math.fsum(values) / len(values)),
                ("max", max(values)),
            ):
                yield name, {"statistic": statistic}, value


def _of_node(node: str, line: Mapping[str, Any]) -> Iterator[Sample]:
    for number, device in enumerate(_list(line, "devices")):
        if isinstance(device, Mapping):
            labels = {"node": node, "device": str(number), "name": str(device.get("name", ""))}
            for name, key in _in("device"):
                if isinstance(value := device.get(key), int | float):
                    yield name, labels, value * (1e6 if key == "clock_mhz" else 1.0)
    for name, key in _in("rank"):
        for rank, value in zip(_list(line, "ranks"), _list(line, key), strict=False):
            yield name, {"node": node, "rank": str(rank)}, value
    for name, key in _in("host"):
        yield name, {"node": node}, _table(line, "host").get(key)


def _list(record: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else ()


def _table(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
