"""Documents: the lines that commands print with --json, each a JSON object of a type that has a schema.

A command writes with `write`, by the name that `DOCUMENTS` gives its type; `argosy config schema --of NAME` prints the
schema that follows from that type. All else that is printed while a command runs with --json goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from argosy.config.section import meanings
from argosy.errors import UserError, near_names
from argosy.observe.records import finite
from argosy.observe.terminal import printable

DIALECT = "https://json-schema.org/draft/2020-12/schema"
STDOUT_FD = 1


@dataclass(frozen=True)
class DocumentKind:
    """The lines of one kind that a command prints."""

    type: str
    """Its type, as "module:name"."""
    about: str
    """The subject of a line."""
    is_many: bool = False
    """True if a command prints any number of them, none too."""

    def load(self) -> Any:
        """Return the type."""
        module, _, name = self.type.partition(":")
        return getattr(import_module(module), name)


DOCUMENTS = {
    "error": DocumentKind("argosy.errors:ErrorDocument", "why a command failed, in place of its document"),
    "dry-run": DocumentKind("argosy.cli.documents:DryRun", "what any command would do, with `--dry-run`"),
    "train": DocumentKind("argosy.observe.report:Report", "the totals of the run"),
    "launch": DocumentKind("argosy.cli.launch:LaunchedRun", "a job that was launched", is_many=True),
    "runs": DocumentKind("argosy.cli.runs:ListedRun", "a run", is_many=True),
    "status": DocumentKind("argosy.watch.status:RunSummary", "how the run is, and what to do"),
    "compare": DocumentKind("argosy.compare.side_by_side:Comparison", "both runs"),
    "metrics": DocumentKind("argosy.cli.metrics:StepRow", "a step: its number by column", is_many=True),
    "metrics-keys": DocumentKind("argosy.cli.metrics:MetricsKeys", "the columns that there are, without `--columns`"),
    "metrics-out": DocumentKind("argosy.cli.documents:WrittenFile", "the file that was written, with `--out`"),
    "logs": DocumentKind("argosy.cli.logs:LogLine", "a line that was printed", is_many=True),
    "stop": DocumentKind("argosy.cli.stop:StoppedJob", "a job that was told to end", is_many=True),
    "sweep": DocumentKind("argosy.sweep.result:SweepRecord", "the trials, and the best"),
    "prepare": DocumentKind("argosy.data.manifest:Manifest", "the manifest of the prepared data"),
    "watch": DocumentKind("argosy.cli.watch:WatchAddress", "where the page is shown"),
    "checkpoint-list": DocumentKind("argosy.cli.checkpoint:ListedCheckpoint", "a checkpoint", is_many=True),
    "checkpoint-list-adapters": DocumentKind(
        "argosy.inference.huggingface:AdapterFacts", "a run with an adapter, of a folder of runs", is_many=True
    ),
    "checkpoint-verify": DocumentKind("argosy.cli.checkpoint:VerifiedCheckpoint", "a checkpoint", is_many=True),
    "checkpoint-prune": DocumentKind("argosy.cli.checkpoint:PrunedCheckpoints", "what was deleted"),
    "checkpoint-export": DocumentKind("argosy.cli.documents:WrittenFile", "the folder that was written"),
    "checkpoint-import": DocumentKind("argosy.cli.documents:WrittenFile", "the run folder that was written"),
    "checkpoint-merge": DocumentKind("argosy.cli.documents:WrittenFile", "the run folder that was written"),
    "generate": DocumentKind("argosy.cli.generate:GeneratedText", "a prompt with its text", is_many=True),
    "chat": DocumentKind("argosy.cli.chat:AnsweredMessage", "a message with its answer", is_many=True),
    "serve": DocumentKind("argosy.cli.serve:ServedModel", "where the model answers"),
    "evaluate": DocumentKind("argosy.training.evaluation:Score", "the losses"),
    "evaluate-tasks": DocumentKind("argosy.cli.evaluate:ScoredTask", "a task, with `--tasks`", is_many=True),
    "parity": DocumentKind("argosy.compare.parity:Parity", "the largest differences"),
    "replay": DocumentKind("argosy.compare.replay:Replay", "each step, before and now"),
    "stacks": DocumentKind("argosy.supervise.stack_gatherer:NodeStacks", "a node with its processes", is_many=True),
    "chaos": DocumentKind("argosy.chaos.run:ChaosReport", "the two trainings compared"),
    "probe": DocumentKind("argosy.plan.hardware.clusters:Cluster", "the machine, as a cluster"),
    "plan": DocumentKind("argosy.plan.report.report:PlanReport", "the layouts, and why"),
    "plan-clusters": DocumentKind(
        "argosy.plan.report.terminal:OnCluster", "a `--cluster` of several with its plan", is_many=True
    ),
    "plan-within": DocumentKind("argosy.plan.report.within:WithinAnswer", "a cluster, with `--within`", is_many=True),
    "plan-serve": DocumentKind("argosy.plan.report.serving_report:ServingReport", "ways to serve, with `--serve`"),
    "plan-run": DocumentKind("argosy.watch.resize:Resizing", "ways to go on, of a run's folder"),
    "plan-jobs": DocumentKind("argosy.plan.report.jobs:JobSchedule", "the schedule, with `--jobs`"),
    "plan-learn": DocumentKind("argosy.plan.calibration:LearntFactors", "the factors, with `--learn`"),
    "design": DocumentKind("argosy.plan.design.report:DesignRecord", "all that was found but the single points"),
    "scaling": DocumentKind("argosy.cli.scaling:ScalingAnswers", "the fit, and what it predicts"),
    "simulate": DocumentKind("argosy.simulate.simulate:SimulatedRecord", "a rank", is_many=True),
    "simulate-cuda": DocumentKind("argosy.simulate.on_cuda:CudaRecord", "a rank, with `--device cuda`", is_many=True),
    "docs": DocumentKind("argosy.cli.docs:ManualPage", "the page"),
    "docs-topics": DocumentKind("argosy.cli.docs:ManualTopics", "the pages that there are, without TOPIC"),
    "config-show": DocumentKind("argosy.config.schema:RunConfig", "the run, resolved"),
    "config-schema": DocumentKind("argosy.cli.config:JsonSchema", "the schema itself"),
    "config-presets": DocumentKind("argosy.cli.config:PresetNames", "the presets"),
    "config-device": DocumentKind("argosy.cli.documents:WrittenFile", "the file that was written"),
}
"""Name -> document. The name is the command's words joined by hyphens, and one more word where options choose."""


@dataclass(frozen=True)
class DryRun:
    """Things that a command would do; none of them was done."""

    would: tuple[str, ...]
    """Each thing, in words that go on from "would"."""
    folder: Path | None = None
    """The folder that it would write, or delete from."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Text that would be submitted to an engine, by job."""


@dataclass(frozen=True)
class WrittenFile:
    """A file or folder that a command wrote."""

    out: str
    """Its path, or its URL in a store."""
    notes: tuple[str, ...] = ()
    """Figures that were assumed for it."""


def write(name: str, *values: object) -> None:
    """Print documents of one kind, a line each, to what stdout was before `documents_on_stdout`. Raises: OSError."""
    stream = _stdout or sys.stdout
    stream.writelines(f"{line}\n" for line in lines_of(name, *values))
    stream.flush()


def answer(is_json: bool, name: str, words: str, *values: object) -> None:
    """Print documents of one kind for a program, as `write` does, or the same in words for a person."""
    if is_json:
        write(name, *values)
    else:
        print(printable(words), flush=True)


def lines_of(name: str, *values: object) -> Iterator[str]:
    """Yield documents of one kind as `write` prints them."""
    adapter = _adapter(name)
    for value in values:
        plain = finite(adapter.dump_python(value, mode="json", by_alias=True, warnings=False))
        yield json.dumps(plain, allow_nan=False)


def write_file(path: Path, content: str | bytes, option: str = "") -> None:
    """Write a file that an option names. Raises: UserError if it cannot be written."""
    from argosy.files import atomic_write

    try:
        with atomic_write(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        named = f"{option} {path}".lstrip()
        raise UserError(f"{named}: cannot be written: {error.strerror}. Name a file in a folder that exists.") from None


def show_dry_run(plan: DryRun, is_json: bool, nothing: str = "nothing to do") -> None:
    """Print what a command would do, as a document or in words; nothing: the words if there is nothing to do."""
    answer(is_json, "dry-run", "\n".join(f"would {line}" for line in plan.would) or nothing, plan)


def schema_of(name: str) -> dict[str, Any]:
    """Return the JSON schema of a document. Raises: UserError if there is none of this name."""
    if name not in DOCUMENTS:
        raise UserError(f"--of {name[:60]}: no such document; {near_names(name, list(DOCUMENTS))}")
    schema = _adapter(name).json_schema(mode="serialization", schema_generator=_Schema)
    return {"$schema": DIALECT, "title": name, **schema}


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(DOCUMENTS[name].load())


class _Schema(GenerateJsonSchema):
    """The schema of what is written: all fields are there, those that are documented say so, and floats may be null."""

    def float_schema(self, schema: Any) -> JsonSchemaValue:
        return {"anyOf": [super().float_schema(schema), {"type": "null"}]}

    def field_is_required(self, field: Any, total: bool) -> bool:
        return not field.get("serialization_exclude")

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _described(super().dataclass_schema(schema), schema["cls"])


def _described(schema: JsonSchemaValue, kind: type) -> JsonSchemaValue:
    """Return the schema with what the docstrings of the fields say."""
    if is_dataclass(kind) or issubclass(kind, BaseModel):
        for name, text in meanings(kind).items():
            if name in schema.get("properties", {}) and text:
                schema["properties"][name]["description"] = " ".join(text.split())
    return schema


_stdout: TextIO | None = None
"""Stdout as it was before `documents_on_stdout`; None outside of it."""


@contextmanager
def documents_on_stdout() -> Iterator[None]:
    """Let only `write` reach stdout in this block; other prints, of child processes too, go to stderr."""
    global _stdout  # noqa: PLW0603  - a process has one
    before, is_real = sys.stdout, False
    with suppress(OSError, ValueError, AttributeError):
        is_real = before.fileno() == STDOUT_FD
    before.flush()
    if is_real:
        kept = os.dup(STDOUT_FD)
        os.dup2(sys.stderr.fileno(), STDOUT_FD)
        _stdout = os.fdopen(kept, "w", encoding="utf-8")
    else:
        _stdout, sys.stdout = before, sys.stderr
    try:
        yield
    finally:
        written, _stdout = _stdout, None
        sys.stdout = before
        if is_real:
            with suppress(OSError):
                before.flush()
            os.dup2(kept, STDOUT_FD)
            with suppress(OSError):
                written.close()
