"""What sending less costs in quality: validation loss for the same tokens, against synchronous sums in fp32.

    python benchmarks/thin_link_quality.py [--ways int8,diloco] [--seeds 0,1,2] [--folder /tmp/quality]

Two replicas, or two sites, train a small decoder on the Python sources of this machine, each way with the same seeds:
the same initial weights, the same samples in each step, the same held-out text. It is `argosy train` that runs, one run
after the other. A run that is in the folder is not made again, so that it can be interrupted. The table and the plot
are of the runs that are there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPLICAS, STEPS, BATCH, TOKENS = 2, 3000, 8, 128
MODEL = {
    "layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "head_width": 32, "ffn_width": 176, "vocab_size": 512,
}  # fmt: skip
LEARNING_RATE = 4e-3
BASELINE = "exact"


@dataclass(frozen=True)
class Way:
    """One way for replicas, or sites, to agree."""

    word: str
    sync: dict[str, Any] = field(default_factory=dict)
    bar: float | None = None
    """How much worse its loss may be, as a share."""

    @property
    def has_sites(self) -> bool:
        """True if sites train alone and agree on the weights."""
        return self.word in ("local", "diloco")


WAYS = {
    "exact": Way("exact"),
    "bf16": Way("bf16"),
    "int8": Way("int8", bar=0.005),
    "int4": Way("int4"),
    "sign": Way("sign"),
    "powersgd": Way("powersgd", bar=0.02),
    "topk": Way("topk", bar=0.02),
    "randomk": Way("randomk"),
    "local H=10": Way("local", {"every_steps": 10}),
    "diloco H=10": Way("diloco", {"every_steps": 10}),
    "diloco H=50": Way("diloco", {"every_steps": 50}, bar=0.02),
    "diloco H=50 int8": Way("diloco", {"every_steps": 50, "wire": "int8"}, bar=0.02),
    "diloco H=250": Way("diloco", {"every_steps": 250}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/quality"))
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE", help="to try settings")
    options = parser.parse_args()
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
    label = "-".join([name.replace(" ", "-").replace("=", ""), *settings, str(seed)]).replace("=", "_")
    path = folder / "results" / f"{label}.json"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        began = time.monotonic()
        run = "q" + "".join(c if c.isalnum() else "-" for c in label)
        file = folder / f"{run}.toml"
        file.write_text(run_file(run, WAYS[name], seed))
        argosy(folder, "train", file.name, *(word for key in settings for word in option(key)))
        record = measured(folder / "runs" / run, WAYS[name])
        path.write_text(json.dumps({"way": name, "seed": seed, **record, "seconds": time.monotonic() - began}))
        file.unlink()
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def option(setting: str) -> list[str]:
    key, value = setting.split("=", 1)
    return [f"--{key.replace('_', '-')}", value]


def run_file(name: str, way: Way, seed: int) -> str:
    layout = "" if way.has_sites else f"dp_replicate={REPLICAS},"
    tables: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"sources": {"data": 1.0}, "seq_len": TOKENS},
        "train": {"steps": STEPS, "global_batch": BATCH},
        "optimizer": {"lr": LEARNING_RATE},
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


if __name__ == "__main__":
    main()
