"""Validation loss by learning rate for models of several widths, with maximal update parametrization and without.

python benchmarks/mup.py
python benchmarks/mup.py --widths 64 128 --lrs 0.001 0.01 --steps 50

Each combination is a real run on the sources of Python and torch. Results are appended to --out; what is there already
is not run again, so the sweep can be stopped and go on. At its end, or with --table, the table is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from argosy.config.data import PrepareConfig
from argosy.config.schema import RunConfig
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.data.prepare import prepare
from argosy.errors import RunFailed
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.loop import train
from argosy.training.stop import StopSignal

HEAD_WIDTH = 16


def main() -> None:
    """Run what is missing, then print the table."""
    options = _options()
    corpus = options.out.with_suffix(".data")
    if not (corpus / MANIFEST).exists():
        prepare(PrepareConfig(input=("builtin:python",), out=corpus, vocab_size=1024, max_text_bytes=8 * 2**20))
    done = _done(options.out)
    for width in options.widths:
        for base in (0, min(options.base, width)):
            for lr in options.lrs:
                key = {"width": width, "base_width": base, "lr": lr, "steps": options.steps}
                if options.table or any(key.items() <= result.items() for result in done):
                    continue
                began = time.monotonic()
                loss = _validation_loss(_run(corpus, key))
                with options.out.open("a") as file:
                    file.write(json.dumps(key | {"loss": loss, "seconds": round(time.monotonic() - began, 1)}) + "\n")
    _show(_done(options.out), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("mup.jsonl"))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--base", type=int, default=64)
    parser.add_argument("--lrs", type=float, nargs="+", default=[2.0**-n for n in range(10, 3, -1)])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def _run(corpus: Path, key: dict[str, Any]) -> RunConfig:
    width = key["width"]
    return RunConfig.model_validate({
        "model": {
            "layers": 2, "width": width, "heads": width // HEAD_WIDTH, "kv_heads": width // HEAD_WIDTH,
            "head_width": HEAD_WIDTH, "ffn_width": 3 * width, "vocab_size": 1024,
            "mup": {"base_width": key["base_width"]},
        },
        "data": {"sources": {str(corpus): 1.0}, "seq_len": 128},
        "train": {"steps": key["steps"], "global_batch": 8},
        "optimizer": {"lr": key["lr"]},
        "schedule": {"warmup_steps": 10},
        "evaluate": {"every_steps": 0, "tokens": 50_000},
        "checkpoint": {"every_minutes": 0, "background": False},
    })  # fmt: skip


def _validation_loss(run: RunConfig) -> float | None:
    """Train, and return the loss on held-out text; None if it diverged."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(run, Plan(compile=False, microbatch=8), World(), Path(folder), StopSignal())
        except RunFailed:
            return None
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return next(line["validation_loss"] for line in reversed(lines) if "validation_loss" in line)


def _done(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _show(done: list[dict[str, Any]], options: argparse.Namespace) -> None:
    losses = {(r["width"], r["base_width"] > 0, r["lr"]): r["loss"] for r in done if r["steps"] == options.steps}
    for mup in (False, True):
        print(
            f"\n{'with' if mup else 'without'} muP\n\n| width | " + " | ".join(f"{lr:.2g}" for lr in options.lrs) + " |"
        )
        print("|---" * (1 + len(options.lrs)) + "|")
        for width in options.widths:
            row = [losses.get((width, mup, lr)) for lr in options.lrs]
            best = min((loss for loss in row if loss is not None), default=None)
            cells = ["-" if loss is None else f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in row]
            print(f"| {width} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
