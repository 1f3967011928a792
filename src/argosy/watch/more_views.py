"""The smaller views of a run: its model, its energy, its profiles, its logs."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from argosy.credentials import redact
from argosy.watch.columns import STEP
from argosy.watch.documents import leads_away, table_of
from argosy.watch.energy import JOULES_PER_KWH, EnergyMeter
from argosy.watch.reader import RunReader
from argosy.watch.series import Buckets

NORM_POINTS = 300
MOST_SAMPLES = 50
MOST_PROFILES = 100
MOST_LOGS, MOST_LOG_LINES, LOG_BYTES = 64, 2000, 2**16
NORMS = ("weight", "gradient", "update")


def model(reader: RunReader, first: float | None = None, last: float | None = None) -> dict[str, Any]:
    """Return norms by layer and step, the load of experts, and the newest samples of text.

    norms: `weight[layer][n]` is that of `layers[layer]` at `step[n]`. experts: `load[layer][expert]`, tokens of the
    newest step; the series are `experts.LAYER.imbalance` and others.
    """
    table = reader.norms
    buckets = Buckets.of(table, first, last, NORM_POINTS)
    layers = list(dict.fromkeys(key.rpartition(".")[0] for key in table if "." in key))
    norms = {kind: [buckets.mean(table[f"{layer}.{kind}"]) for layer in layers] for kind in NORMS}
    return {
        "norms": {"step": np.round(buckets.mean(table[STEP])), "layers": layers, **norms},
        "experts": _experts(reader.last_line),
        "samples": reader.samples[-MOST_SAMPLES:],
    }


def _experts(line: dict[str, Any]) -> dict[str, Any]:
    tables = line.get("experts")
    if not isinstance(tables, dict):
        return {"layers": [], "step": None, "load": []}
    layers = [layer for layer, table in tables.items() if isinstance(table, dict) and "tokens" in table]
    facts = {name: [tables[layer].get(name) for layer in layers] for name in ("imbalance", "entropy", "dropped")}
    return {"layers": layers, "step": line["step"], "load": [tables[layer]["tokens"] for layer in layers], **facts}


def energy(reader: RunReader, meter: EnergyMeter) -> dict[str, Any]:
    """Return the energy of a run: what its report says, or what the agents measured so far."""
    meter.refresh()
    reported = (reader.report or {}).get("energy")
    reported = reported if isinstance(reported, dict) else {}
    so_far = {"kwh": meter.joules / JOULES_PER_KWH, "source": meter.source} if meter.joules else {}
    tokens = reader.last_line.get("tokens")
    if so_far and isinstance(tokens, int | float) and tokens:
        so_far["per_token"] = {"joules": meter.joules / tokens}
    return {**so_far, **reported, "series": meter.series()}


def profiles(reader: RunReader) -> list[dict[str, Any]]:
    """Return the profiles that were recorded, with their summaries and files."""
    found = []
    for folder in _folders(reader.folder, "profiles")[:MOST_PROFILES]:
        entry: dict[str, Any] = {"name": folder.name}
        try:
            if not leads_away(reader.folder, f"profiles/{folder.name}/summary.json"):
                entry |= table_of(folder / "summary.json")
        except FileNotFoundError:
            entry["problem"] = "it has no summary.json yet"
        except (OSError, ValueError, RecursionError):
            entry["problem"] = "summary.json cannot be read"
        entry |= {"name": folder.name, "files": _files(reader.folder, folder)}
        found.append(entry)
    return found


def _files(run: Path, folder: Path) -> list[dict[str, Any]]:
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return [{"name": name, "bytes": (folder / name).stat().st_size} for name in names]


def _folders(run: Path, name: str) -> list[Path]:
    if leads_away(run, name):
        return []
    with suppress(OSError):
        return sorted(path for path in (run / name).iterdir() if path.is_dir() and not path.is_symlink())
    return []


def logs(reader: RunReader) -> dict[str, Any]:
    """Return the last lines of what processes printed, credentials in URLs hidden; those that say most recent last."""
    if leads_away(reader.folder, "logs"):
        return {"lines": []}
    paths: list[Path] = []
    with suppress(OSError):
        paths = [path for path in (reader.folder / "logs").iterdir() if path.is_file() and not path.is_symlink()]
    lines = []
    for path in sorted(paths, key=_modified_s)[-MOST_LOGS:]:
        each = _last_lines(path)
        lines += [{"process": path.stem, "text": redact(text)} for text in each]
    return {"lines": lines[-MOST_LOG_LINES:], "more": max(0, len(paths) - MOST_LOGS)}


def _last_lines(path: Path) -> list[str]:
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        lines = file.read(LOG_BYTES).decode(errors="replace").splitlines()
        return lines[1:] if size > LOG_BYTES else lines
    return []


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return -math.inf
