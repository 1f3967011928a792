"""The smallest real run: a two-layer model on this package's own sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.data.prepare import prepare

import argosy
from argosy.config.schema import ModelConfig, PrepareConfig, RunConfig
from argosy.parallel.world import World, lay_out
from argosy.plan.plan import Plan

SOURCES = Path(argosy.__file__).parent
MODEL = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "ffn_width": 64,
    "vocab_size": 400,
}


def prepare_corpus(out: Path) -> Path:
    """Prepare the package's own Python files into `out`."""
    prepare(
        PrepareConfig(
            input=(str(SOURCES),), out=out, vocab_size=MODEL["vocab_size"], validation_fraction=0.1, processes=1
        )
    )
    return out


def run_config(corpus: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of 8 steps on `corpus`; `sections` override single keys."""
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"sources": {str(corpus): 1.0}, "seq_len": 32},
        "train": {"steps": 8, "global_batch": 8},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
        "evaluate": {"every_steps": 4, "tokens": 1000},
        "checkpoint": {"every_minutes": 0},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return RunConfig.model_validate({"name": "tiny", **merged})


def model_config(**keys: Any) -> ModelConfig:
    """The tiny model, with `keys` changed."""
    return ModelConfig.model_validate({**MODEL, **keys})


def train_in(world: World, run: RunConfig, plan: Plan, run_dir: Path) -> list[dict[str, Any]]:
    """Train in this process as one rank of `world`; the metric records of the run so far."""
    from argosy.observe.metrics import Metrics
    from argosy.training.loop import train
    from argosy.training.stop import StopSignal

    train(run, plan, lay_out(world, plan), run_dir, StopSignal())
    return Metrics(run_dir).read()
