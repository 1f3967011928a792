"""Show a resolved run, the JSON schema of run files, and the presets.

Examples:
  argosy config show                                the built-in demo, every key with its meaning
  argosy config show run.toml --train.steps 100     a run file with one key changed
  argosy config show run.toml --json                the same for a program
  argosy config show runs/mine                      what the run in this folder was started with
  argosy config show --name mine > my.toml          a run file to start from
  argosy config schema > run.schema.json            for an editor that completes and checks run files
  argosy config schema --of status                  of what a command prints with --json
  argosy config presets                             models, runs, devices and clusters that come with Argosy
  argosy config device mine --bf16-tflops 200 --memory-gb 32 --memory-gb-s 1000
                                                    a device that these lack, from its data sheet, as mine.toml
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tyro
from pydantic import ValidationError

from argosy.cli.documents import DOCUMENTS, WrittenFile, answer, schema_of, write, write_file
from argosy.cli.options import PrintJson, about_action, act, parse, parse_run
from argosy.config.dump import dump
from argosy.config.layers import preset_layer, preset_names, preset_path
from argosy.config.load import RUN_FILE, build
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError, first_error
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.data_sheet import DataSheet
from argosy.plan.hardware.devices import find_device
from argosy.plan.parameters import parameters

LAPTOP_VOCABULARY = 4096


@dataclass(frozen=True)
class Options:
    """Options of every `argosy config` command."""

    json: PrintJson = False


@dataclass(frozen=True)
class SchemaOptions(Options):
    of: str = "run"
    """run: run files; else one of these documents, which commands print with --json."""


JsonSchema: TypeAlias = dict[str, Any]
"""A JSON schema."""


@dataclass(frozen=True)
class PresetNames:
    """Names of the presets that come with Argosy."""

    models: dict[str, int]
    """Model presets, each with its number of parameters."""
    runs: list[str]
    devices: list[str]
    clusters: list[str]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(DataSheet):
    """Options of `argosy config device`: the figures of a data sheet. TFLOP/s are dense, with fp32 accumulation: half
    of what is printed "with sparsity"."""

    name: Annotated[str, tyro.conf.Positional]
    """A name for the device."""
    out: Path | None = None
    """The file to write; default: NAME.toml. It must not exist yet."""
    json: PrintJson = False


def main(argv: list[str]) -> int:
    return act("config", {"show": _show, "schema": _schema, "presets": _presets, "device": _device}, argv)


def _show(argv: list[str]) -> None:
    """Show what a run comes to: every key with its value and its meaning, as a run file. It can be the start of one of
    your own.
    """
    if argv and (Path(argv[0]) / RUN_FILE).is_file():
        argv = [str(Path(argv[0]) / RUN_FILE), *argv[1:]]
    options, run = parse_run(argv, "argosy config show", Options, about_action(_show))
    if options.json:
        write("config-show", run)
    else:
        print(dump(run).rstrip())


def _schema(argv: list[str]) -> None:
    """Print the JSON schema of run files, for an editor that completes and checks them; or of what a command prints
    with --json.
    """
    listed = [f"  {name:<24}  {each.about}{'; any number of lines' * each.is_many}" for name, each in DOCUMENTS.items()]
    about = "\n".join([f"{about_action(_schema)}\n\nDocuments:", *listed])
    options = parse(argv, "argosy config schema", SchemaOptions, about)
    schema = RunConfig.model_json_schema() if options.of == "run" else schema_of(options.of)
    answer(options.json, "config-schema", json.dumps(schema, indent=2), schema)


def _presets(argv: list[str]) -> None:
    """List what comes with Argosy: models with their sizes, runs, devices and clusters."""
    options = parse(argv, "argosy config presets", Options, about_action(_presets))
    models = {name: parameters(_model(name)) for name in preset_names("models")}
    if options.json:
        write("config-presets", PresetNames(models, *(preset_names(kind) for kind in ("runs", "devices", "clusters"))))
        return
    print(f"models (--model.preset NAME), parameters (with {LAPTOP_VOCABULARY} tokens where that is open)")
    for name, count in sorted(models.items(), key=lambda item: item[1]):
        print(f"  {name:16}{_rounded(count):>8}")
    print("runs (argosy train NAME)")
    for name in preset_names("runs"):
        print(f"  {name}")
    print("devices (in clusters, such as --cluster 8xh100): large bf16 matmuls (fp16, fp32 if it has none), memory")
    for name in preset_names("devices"):
        device = find_device(name)
        rate, memory = device.best_flops_per_s / 1e12, device.memory_bytes / 2**30
        print(f"  {name:22}{rate:>9.4g} TFLOP/s{memory:>5.0f} GiB  {', '.join(device.aliases)}".rstrip())
    print("clusters (--cluster NAME)")
    for name in preset_names("clusters"):
        cluster = Cluster.load(preset_path("clusters", name))
        print(f"  {name:16}{' + '.join(f'{group.devices} {group.device.name}' for group in cluster.groups)}")


def _device(argv: list[str]) -> None:
    """Write a device that the catalogue lacks to a file, from the figures of its data sheet; `argosy plan --cluster
    8xFILE`, launch.cluster and `argosy probe --device` read it.
    """
    options = parse(argv, "argosy config device", DeviceOptions, about_action(_device))
    try:
        device = options.device(options.name)
    except ValidationError as problem:
        why = first_error(problem).removeprefix("Value error, ")
        raise UserError(f"{options.name}: no device has such figures: {why}") from None
    path = options.out or Path(f"{options.name}.toml")
    if path.exists():
        raise UserError(f"{path} exists already. Choose another --out, or remove it first.")
    write_file(path, dump(device))
    told = {key for key in device.assumed if not key.endswith("latency_s")}
    if options.json:
        write("config-device", WrittenFile(str(path), tuple(f"assumed: {key}" for key in sorted(told))))
        return
    print(f"wrote {path}; use it as --cluster 8x{path}" + (f"; assumed: {', '.join(sorted(told))}" if told else ""))


def _model(name: str) -> ModelConfig:
    model = build(RunConfig, preset_layer(preset_path("models", name))).model
    return model if model.vocab_size else model.model_copy(update={"vocab_size": LAPTOP_VOCABULARY})


def _rounded(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
