"""What sending less costs in quality: validation loss for the same tokens, against synchronous sums in fp32.

    python benchmarks/thin_link_quality.py [--ways "int8,diloco H=50"] [--seeds 0,1,2] [--folder /tmp/quality]
    python benchmarks/thin_link_quality.py --report      # the table and the plot, of the runs that are there

Two replicas, or two sites, train a small decoder on the Python sources of this machine, each way with the same seeds:
the same initial weights, the same samples in each step, the same held-out text. It is `argosy train` that runs, one run
after the other. A run that is in the folder is not made again, so that it can be interrupted. The table and the plot
are of the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

REPLICAS, STEPS, BATCH, TOKENS = 2, 3000, 8, 128
MODEL = {
    "layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "head_width": 32, "ffn_width": 176, "vocab_size": 512,
}  # fmt: skip
LEARNING_RATE = 4e-3
BASELINE = "exact"
ENOUGH = 3
"""Seeds."""
TUNING_SEED = 100
"""Settings were chosen with this seed and those after it; they are in no table."""
HERE = Path(__file__).parent
RESULTS, PLOT = HERE / "results/thin_link_quality.md", HERE.parent / "docs/thin-links-quality.svg"
HEAD = """# What sending less costs in quality

`python benchmarks/thin_link_quality.py`, {date}, a 2-core CPU machine, Python {python}, torch {torch}, gloo. A dense
decoder of 2 layers and 64 widths (0.17 M parameters), fp32, on the Python sources of the standard library and torch:
{steps} steps of 1024 tokens, {tokens:.1f} M tokens in all, each seen once; AdamW, learning rate {lr:g}, cosine. Two
replicas, or two sites, of 512 tokens each. "Worse" is the mean over seeds of the validation loss (100,000 held-out
tokens) over that of exact sums with the same seed. Settings that are not the usual ones are in the table; they were
chosen with a seed that is not in it.

| way | settings | validation loss | worse | bar | bytes, of exact | seeds |
|---|---|---|---|---|---|---|
"""
TUNING = """
How the settings were chosen: one run each with a seed that is in no other table, all with the usual settings and a
learning rate of 4e-3 but for what is named (`KEY_VALUE`).

| way | but for | validation loss | worse |
|---|---|---|---|"""


@dataclass(frozen=True)
class Way:
    """One way for replicas, or sites, to agree."""

    word: str
    sync: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Keys of `[optimizer]` that fit this way better."""
    bar: float | None = None
    """How much worse its loss may be, as a share."""

    @property
    def has_sites(self) -> bool:
        """True if sites train alone and agree on the weights."""
        return self.word in ("local", "diloco")


SHORT_RUN: dict[str, Any] = {"outer_lr": 0.9, "outer_momentum": 0.5}
"""A momentum of 0.9 looks back over 10 rounds, which is a sixth of this run."""
INNER = {"lr": 3e-3}
WARM_UP = {"exact_steps": STEPS // 10}
THINNING = {"density_steps": 2 * STEPS // 3}
SPARSE = {"lr": 3e-3, "beta2": 0.999}
"""A number is updated once in some dozen steps: Adam's second moment has to last from one update to the next."""

WAYS = {
    "exact": Way("exact"),
    "bf16": Way("bf16"),
    "int8": Way("int8", bar=0.005),
    "int4": Way("int4"),
    "sign": Way("sign", WARM_UP),
    "powersgd": Way("powersgd", WARM_UP, bar=0.02),
    "topk": Way("topk", THINNING, SPARSE, bar=0.02),
    "local H=10": Way("local", {"every_steps": 10}),
    "diloco H=10": Way("diloco", {"every_steps": 10, **SHORT_RUN}, INNER),
    "diloco H=50": Way("diloco", {"every_steps": 50, **SHORT_RUN}, INNER, bar=0.02),
    "diloco H=50 int8": Way("diloco", {"every_steps": 50, "wire": "int8", **SHORT_RUN}, INNER, bar=0.02),
    "streaming H=50": Way("diloco", {"every_steps": 50, "fragments": 2, "overlap_steps": 10, **SHORT_RUN}, INNER),
    "diloco H=250": Way("diloco", {"every_steps": 250, **SHORT_RUN}, INNER),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quality"))
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="to try settings")
    options = parser.parse_args()
    if options.report:
        report(options.folder)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options.folder)
    for seed in map(int, options.seeds.split(",")):
        for way in options.ways.split(","):
            found = result(options.folder, way, seed, options.set)
            print(
                f"{way:20} seed {seed}  {found['loss']:.4f}  {found['seconds']:.0f} s {options.set or ''}", flush=True
            )


def prepare(folder: Path) -> None:
    argosy(
        folder, "prepare", "builtin:python", "--out", "data", "--vocab-size", str(MODEL["vocab_size"]),
        "--validation-fraction", "0.02", "--processes", "1",
    )  # fmt: skip


def argosy(folder: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "argosy", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"argosy {' '.join(words)}\n{done.stdout}\n{done.stderr}")


def result(folder: Path, name: str, seed: int, settings: list[str]) -> dict[str, Any]:
    """Return the losses of one run, which is made if it is not there."""
    of_run = label(name, settings, seed)
    path = folder / "results" / f"{of_run}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        began = time.monotonic()
        run = "q" + "".join(c if c.isalnum() else "-" for c in of_run)
        file = folder / f"{run}.toml"
        file.write_text(run_file(run, WAYS[name], seed))
        argosy(folder, "train", file.name, *(word for key in settings for word in option(key)))
        record = measured(folder / "runs" / run, WAYS[name])
        path.write_text(json.dumps({"way": name, "seed": seed, **record, "seconds": time.monotonic() - began}))
        file.unlink()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def label(name: str, settings: list[str], seed: int | None) -> str:
    """Return the name of a run's file; without a seed, what those of all seeds begin with."""
    words = [name.replace(" ", "-").replace("=", ""), *settings, *([] if seed is None else [str(seed)])]
    return "-".join(words).replace("=", "_")


def option(setting: str) -> list[str]:
    key, value = setting.split("=", 1)
    return [f"--{key.replace('_', '-')}", value]


def run_file(name: str, way: Way, seed: int) -> str:
    layout = "" if way.has_sites else f"dp_replicate={REPLICAS},"
    tables: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"sources": {"data": 1.0}, "seq_len": TOKENS},
        "train": {"steps": STEPS, "global_batch": BATCH},
        "optimizer": {"lr": LEARNING_RATE, **way.optimizer},
        "schedule": {"kind": "cosine", "warmup_steps": 50},
        "evaluate": {"every_steps": STEPS // 6, "tokens": 100_000},
        "checkpoint": {"every_minutes": 0},
        "launch": {"processes": 1 if way.has_sites else REPLICAS, "threads": 1},
        "resilience": {"node_check_s": 0},
        "sync": way.sync,
    }
    plan = f"{layout}microbatch={BATCH // REPLICAS},compile=false,precision=fp32,sync={way.word}"
    lines = [f'name = "{name}"', f"seed = {seed}", f'plan = "{plan}"']
    for table, keys in tables.items():
        lines += [f"[{table}]", *(f"{key} = {toml(value)}" for key, value in keys.items())]
    if way.has_sites:
        lines += [f'[[sites]]\nname = "site{at}"' for at in range(REPLICAS)]
    return "\n".join(lines) + "\n"


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {toml(one)}' for key, one in value.items()) + "}"
    return json.dumps(value)


def measured(run_dir: Path, way: Way) -> dict[str, Any]:
    """Return validation losses by step, the last one, and what was sent a step."""
    if way.has_sites:
        run_dir = run_dir / "sites" / "site0"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [[line["step"] + 1, line["validation_loss"]] for line in lines if "validation_loss" in line]
    sent = [line["sites"]["sent_bytes"] for line in lines if "sites" in line]
    sent += [
        line["communication"]["replicate"]["node"][1] for line in lines if "replicate" in line.get("communication", {})
    ]
    return {"curve": curve, "loss": curve[-1][1], "bytes_per_step": sum(sent) / STEPS}


# ---- the table and the plot -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One way beside exact sums, over the seeds that both have."""

    name: str
    seeds: int
    loss: float
    spread: float
    """Standard deviation of the loss over seeds."""
    worse: float
    """Mean over seeds of how much larger the loss is than that of exact sums, as a share."""
    bytes_share: float
    """Bytes sent over those of exact sums."""

    @property
    def verdict(self) -> str:
        bar = WAYS[self.name].bar
        if bar is None:
            return ""
        verdict = "too few seeds" if self.seeds < ENOUGH else "yes" if self.worse <= bar else "no"
        return f"{bar:.1%}: {verdict}"


def compared(folder: Path) -> list[Compared]:
    """Return the ways of which there are runs, in the order of WAYS."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name in WAYS:
        for path in folder.glob(f"results/{label(name, [], None)}-*.json"):
            record = json.loads(path.read_text())
            if path.stem == label(name, [], record["seed"]) and record["seed"] < TUNING_SEED:
                found.setdefault(name, {})[record["seed"]] = record
    exact = found[BASELINE]
    return [_compared(name, {s: r for s, r in runs.items() if s in exact}, exact) for name, runs in found.items()]


def _compared(name: str, runs: dict[int, dict[str, Any]], exact: dict[int, dict[str, Any]]) -> Compared:
    losses = [run["loss"] for run in runs.values()]
    return Compared(
        name=name,
        seeds=len(runs),
        loss=mean(losses),
        spread=stdev(losses) if len(losses) > 1 else 0.0,
        worse=mean(run["loss"] / exact[seed]["loss"] - 1 for seed, run in runs.items()),
        bytes_share=mean(run["bytes_per_step"] / exact[seed]["bytes_per_step"] for seed, run in runs.items()),
    )


def report(folder: Path) -> None:
    """Write the table to benchmarks/results and the plot to docs."""
    rows = compared(folder)
    lines = [
        f"| {one.name} | {settings_of(WAYS[one.name])} | {one.loss:.4f}"
        f"{f' ± {one.spread:.4f}' if one.seeds > 1 else ''} | {one.worse:+.2%} "
        f"| {one.verdict} | {one.bytes_share:.3g} | {one.seeds} |"
        for one in rows
    ]
    head = HEAD.format(
        date=time.strftime("%Y-%m-%d"), torch=version("torch"), python=sys.version.split()[0], steps=STEPS,
        tokens=STEPS * BATCH * TOKENS / 1e6, lr=LEARNING_RATE,
    )  # fmt: skip
    RESULTS.write_text("\n".join([head.rstrip("\n"), *lines, *tuning(folder)]) + "\n")
    if len(rows) > 1:
        PLOT.write_text(plot(rows))
    print(f"{RESULTS}\n{PLOT}")


def tuning(folder: Path) -> list[str]:
    """Return the table of the runs that settings were chosen by, of which the settings stand in the files' names."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("results/*.json"))}
    tried = {stem: run for stem, run in found.items() if run["seed"] >= TUNING_SEED}
    exact = {run["seed"]: run["loss"] for stem, run in tried.items() if stem == label(BASELINE, [], run["seed"])}
    rows = [
        (run["way"], stem.removeprefix(label(run["way"], [], None)).removesuffix(str(run["seed"])).strip("-"), run)
        for stem, run in tried.items()
        if run["seed"] in exact
    ]
    return [TUNING, *(
        f"| {way} | {settings.replace('-sync', ', sync').replace('-optimizer', ', optimizer')} | {run['loss']:.4f} "
        f"| {run['loss'] / exact[run['seed']] - 1:+.2%} |"
        for way, settings, run in rows
    )]  # fmt: skip


def settings_of(way: Way) -> str:
    return ", ".join(f"`{key} = {json.dumps(value)}`" for key, value in {**way.sync, **way.optimizer}.items())


def plot(rows: list[Compared]) -> str:
    """Return an SVG: how much worse the loss is, over the share of bytes that is sent."""
    shown = [one for one in rows if one.name != BASELINE]
    width, height, left, bottom = 560, 320, 64, 44
    least, most = math.log10(min(one.bytes_share for one in shown)) - 0.15, 0.1
    highest = max(0.03, *(one.worse for one in shown)) * 1.1
    lowest = min(0.0, *(one.worse for one in shown)) - 0.05 * highest

    def across(share: float) -> float:
        return left + (math.log10(share) - least) / (most - least) * width

    def down(worse: float) -> float:
        return 16 + (highest - worse) / (highest - lowest) * height

    parts = [f'<rect x="{left}" y="16" width="{width}" height="{height}" fill="none" stroke="#cbd5e1"/>']
    for power in range(math.ceil(least), 1):
        at = across(10**power)
        parts.append(f'<text x="{at:.0f}" y="{height + 32}" text-anchor="middle">1/{10**-power:g}</text>')
        parts.append(f'<path d="M{at:.0f} 16v{height}" stroke="#e2e8f0"/>')
    for percent in range(math.ceil(100 * lowest), math.floor(100 * highest) + 1, max(1, round(20 * highest))):
        at = down(percent / 100)
        parts.append(f'<text x="{left - 6}" y="{at + 4:.0f}" text-anchor="end">{percent:+d} %</text>')
        parts.append(f'<path d="M{left} {at:.0f}h{width}" stroke="#e2e8f0"/>')
    for one in shown:
        x, y = across(one.bytes_share), down(one.worse)
        colour = "#ea580c" if WAYS[one.name].has_sites else "#2563eb"
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5" fill="{colour}"/>')
        anchor, beside = ("end", -8) if x > left + 0.75 * width else ("start", 8)
        parts.append(f'<text x="{x + beside:.0f}" y="{y + 4:.0f}" text-anchor="{anchor}">{escape(one.name)}</text>')
    middle = left + width / 2
    parts.append(
        f'<text x="{middle}" y="{height + bottom + 10}" text-anchor="middle">bytes sent, of those of fp32</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height + bottom + 24}" '
        'font-family="sans-serif" font-size="12" fill="#334155"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="11">validation loss beside that of exact sums in fp32, same tokens</text>'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()
