"""Measure the machine at hand, and write it as a cluster file that `argosy plan --cluster` takes.

Matmuls at the model's shapes, attention, memory, the host's time for each operation and layer, collectives in groups
of each size alone and at once, disk and loader: with all processes at work, as in training. Price, power and failure
rates cannot be measured and come from the catalogue. Under torchrun it joins torchrun's processes, and measures between
nodes too.

Examples:
  argosy probe                                      the demo's model; writes cluster.toml
  argosy probe --model llama3-8b --out dgx.toml     the shapes of another model
  argosy probe --run run.toml --processes 4         those of a run, and its data if they are prepared
  torchrun --nproc-per-node 8 --nnodes 2 ... -m argosy probe --model llama3-8b
  argosy probe --dry-run                            what it would measure and write
  argosy probe --run run.toml --site oslo           the links to the run's other sites, where the same is typed
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.documents import DryRun, answer, show_dry_run, write
from argosy.cli.options import parse
from argosy.errors import UserError, counted

if TYPE_CHECKING:
    from argosy.config.schema import RunConfig
    from argosy.plan.hardware.clusters import Cluster


@dataclass(frozen=True)
class Options:
    model: str | None = None
    """A model preset, whose shapes are measured."""
    run: Path | None = None
    """A run file, in place of --model."""
    processes: int = 0
    """Processes that measure at once; 0: one per GPU, or without GPUs one per core, at most 8."""
    site: str = ""
    """Name of this site of the run: measure only the links to the others, and add them to the file."""
    device: str | None = None
    """Device by its name in the catalogue, or a device file; if not given, the name that its driver gives."""
    out: Path = Path("cluster.toml")
    """The cluster file to write, or with --site to add to. Its disk is the one that is measured."""
    minutes: float = 5.0
    """About how long the probe may take; with --site, how long it waits for the others."""
    dry_run: bool = False
    """Say what would be measured and written, and do neither."""
    json: bool = False
    """Print JSON: the cluster."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy probe", Options)
    _check(options)
    from argosy.config.load import load
    from argosy.plan.hardware.devices import find_device

    run = load(options.run, _overrides(options))
    if options.device is not None:
        find_device(options.device)  # what is wrong with the command is said before torch is imported
    if options.dry_run:
        show_dry_run(_would(options, run), options.json)
        return
    if options.site:
        _probe_links(run, options)
        return
    from argosy.probe.probe import ProbeRequest, catalogue_device, find_probed, probe_here, probe_joined

    devices = find_probed(run.launch)
    request = ProbeRequest(
        run=run,
        device=catalogue_device(devices.kind, options.device),
        folder=options.out.absolute().parent,
        seconds=60 * options.minutes,
        quiet=options.json,
    )
    if "RANK" in os.environ:
        cluster, world = probe_joined(request)
        if not world.is_first:
            return
    else:
        cluster = probe_here(request, devices.count)
    cluster.save(options.out)
    answer(options.json, "probe", f"{cluster_in_words(cluster)}\nwrote {options.out}", cluster)


def _would(options: Options, run: RunConfig) -> DryRun:
    """Return what would be done."""
    from argosy.config.load import model_name

    if options.site:
        what = (
            f"wait {options.minutes:g} minutes at most for the other sites of {run.name}, and measure the links to them"
        )
        return DryRun((what, f"add them to {options.out}"))
    processes = counted(options.processes, "process", "es") if options.processes else "a process a device"
    would = (
        f"start {processes}, and measure for about {options.minutes:g} minutes the shapes of {model_name(run.model)}"
    )
    return DryRun((would, f"write {options.out}"))


def _probe_links(run: RunConfig, options: Options) -> None:
    from argosy.probe.sites import probe_links

    cluster = probe_links(run, options.out, 60 * options.minutes, quiet=options.json)
    cluster.save(options.out)
    if options.json:
        write("probe", cluster)
        return
    for link in cluster.links:
        rate, latency_ms = link.bandwidth_bytes_per_s, 1e3 * link.latency_s
        between = " and ".join(link.sites)
        print(f"  {between}: {8e-6 * rate:,.0f} Mbit/s ({rate / 1e6:,.1f} MB/s), {latency_ms:.2f} ms one way")
    print(f"wrote {options.out}")


def _check(options: Options) -> None:
    if options.site and options.run is None:
        raise UserError(f"--site {options.site} is a site of a run: name its run file with --run.")
    if options.site and (options.processes or options.device is not None):
        raise UserError("--site measures links only. Leave out --processes and --device.")
    if options.model is not None and options.run is not None:
        raise UserError("--model and --run both name a model: give one of them.")
    if not 0 < options.minutes < math.inf or options.processes < 0:
        raise UserError("--minutes must be above 0 and --processes at least 0. Try --minutes 5.")
    if not options.out.absolute().parent.is_dir():
        raise UserError(f"--out {options.out}: there is no folder {options.out.absolute().parent}.")
    if options.out.is_dir() or not os.access(options.out.absolute().parent, os.W_OK):
        raise UserError(f"--out {options.out}: no file can be written there. Name one, such as ./cluster.toml.")


def _overrides(options: Options) -> dict[str, object]:
    given = {"model.preset": options.model, "launch.processes": options.processes, "site": options.site}
    return {key: value for key, value in given.items() if value}


def cluster_in_words(cluster: Cluster) -> str:
    found, device = cluster.measured, cluster.device
    assert found is not None
    rates = {fmt: device.matmul_flops_per_s(fmt) for fmt in device.formats}
    rows = {
        "matmuls": _listed({fmt: f"{rate / 1e9:,.0f} GFLOP/s" for fmt, rate in rates.items()}),
        "attention": _listed({a.number_format: f"{a.forward_flops_per_s / 1e9:,.0f} GFLOP/s" for a in found.attention}),
        "memory": f"{_gb(found.memory_copy_bytes_per_s)}, {device.memory_bytes / 1e9:.1f} GB a device",
        "host": f"{1e6 * (found.launch_s or 0):.1f} us an operation, {1e3 * (found.layer_host_s or 0):.2f} ms a layer",
        "disk": f"write {_gb(found.disk_write_bytes_per_s)}, read {_gb(found.disk_read_bytes_per_s)}",
        "loader": f"{(found.loader_tokens_per_s or 0) / 1e6:.1f}M tokens/s",
    }
    lines = [f"{cluster.name}   {cluster.software}", *(f"  {name:10} {text}" for name, text in rows.items())]
    for row in found.collectives:
        lines.append(
            f"  {row.operation:15}{row.groups} x {row.ranks} in the {row.tier:8} from {row.from_bytes:>9} B  "
            f"{1e6 * row.latency_s:8.0f} us{f' + {_gb(row.bytes_per_s)}' if row.bytes_per_s else ''}"
        )
    return "\n".join(lines)


def _listed(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _gb(bytes_per_s: float | None) -> str:
    return f"{(bytes_per_s or 0) / 1e9:.2f} GB/s"
