"""Show a resolved run, the JSON schema of run files, and the presets.

Examples:
  argosy config show                                the built-in demo, every key with its meaning
  argosy config show run.toml --train.steps 100     a run file with one key changed
  argosy config show run.toml --json                the same for a program
  argosy config schema > run.schema.json            for an editor that completes and checks run files
  argosy config presets                             models, runs, devices and clusters that come with Argosy
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from argosy.cli.options import parse, parse_run
from argosy.config.catalog import Kind, preset_names, preset_path
from argosy.config.dump import dump
from argosy.config.layers import preset_layer
from argosy.config.load import build
from argosy.config.schema import ModelConfig, RunConfig
from argosy.errors import UserError
from argosy.plan.flops import parameters
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import find_device

LAPTOP_VOCABULARY = 4096


@dataclass(frozen=True)
class Options:
    """Options of every `argosy config` command."""

    json: bool = False
    """Print JSON."""


def main(argv: list[str]) -> int:
    """`argosy config ACTION ...`."""
    actions = {"show": _show, "schema": _schema, "presets": _presets}
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: argosy config {{{','.join(actions)}}} ...\n\n{(__doc__ or '').strip()}")
        return 0
    if argv[0] not in actions:
        raise UserError(f"config {argv[0]}: there is no such action. Try: {', '.join(actions)}.")
    actions[argv[0]](argv[1:])
    return 0


def _show(argv: list[str]) -> None:
    options, run = parse_run(argv, "argosy config show", Options)
    print(run.model_dump_json(indent=2) if options.json else dump(run).rstrip())


def _schema(argv: list[str]) -> None:
    parse(argv, "argosy config schema", Options)
    print(json.dumps(RunConfig.model_json_schema(), indent=2))


def _presets(argv: list[str]) -> None:
    options = parse(argv, "argosy config presets", Options)
    models = {name: parameters(_model(name)) for name in preset_names("models")}
    if options.json:
        others: dict[Kind, list[str]] = {kind: preset_names(kind) for kind in ("runs", "devices", "clusters")}
        print(json.dumps({"models": models, **others}, indent=2))
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


def _model(name: str) -> ModelConfig:
    model = build(RunConfig, preset_layer(preset_path("models", name))).model
    return model if model.vocab_size else model.model_copy(update={"vocab_size": LAPTOP_VOCABULARY})


def _rounded(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
