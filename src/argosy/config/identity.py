"""The parts of a run file that decide its numbers: what a checkpoint depends on, and whether a run repeats itself."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from argosy.config.model import MuPConfig
from argosy.config.observe import AlertsConfig, ProfileConfig
from argosy.config.schema import RunConfig
from argosy.config.section import dotted, flatten
from argosy.config.train import LoraConfig
from argosy.errors import UserError

RESUME_MAY_CHANGE = ("name", "plan", "model.preset", "model.weights", "train.steps", "train.minutes", "train.epochs",
              "train.pause_at", "train.deterministic", "evaluate", "checkpoint", "launch", "resilience", "observe",
              "data.prepare", "data.on_bad_shard", "data.cache", "site", "sites", "sync.servers", "sync.shards",
              "sync.server_launch",
              "sync.max_staleness", "sync.staleness_rate",
              "extend")  # fmt: skip
"""Keys that a resumed run may change: they affect neither what the checkpoint means nor the order of the samples."""


ADDED = {
    "model.qkv_bias": False,
    "model.ffn_gate": True,
    "model.score": False,
    "preference.centring": 0.0,
    "train.loss": "cross_entropy",
    "train.frozen": [],
    "train.batch_ramp": [],
    "schedule.warmup_fraction": 0.0,
    "sync.local_steps": 1,
    **{f"lora.{name}": value for name, value in LoraConfig().model_dump(mode="json").items()},
    **{f"model.mup.{name}": 0 for name in MuPConfig.model_fields},
}
"""Keys that older versions did not have, with the value that says what these did: it is left out, as they left it."""

REPETITION: dict[str, Any] = {
    "evaluate": {"every_steps": 0, "tokens": 1, "tasks": (), "sample_prompt": None},  # a window at the end, and no more
    "checkpoint": {"every_steps": 0, "every_minutes": 0.0, "remote": ""},
    "resilience": {"rebalance": False},  # shares that follow from times are others each time
    "observe": {
        "alerts": AlertsConfig(), "sinks": (), "sample_every_steps": 0, "noise_scale_every_steps": 0,
        "profile": ProfileConfig(),
    },
    "launch": {
        "max_restarts": 0, "nodes": 1, "coordinator": "", "port": 0, "lease": "", "address": "", "node": "",
        "rank_map": "",
    },
}  # fmt: skip
"""Keys with which a run is repeated on this machine alone: it runs no command of the run's, sends nothing away, and
measures and keeps only what is compared."""


def lasting_values(run: RunConfig) -> dict[str, Any]:
    """Return dotted key -> value for all keys except those that may change.

    Code of the user's counts by its checksum, wherever it lies.
    """
    values = {dotted(key): value for key, value in flatten(run.model_dump(mode="json"), RunConfig).items()}
    lasting = {key: value for key, value in values.items() if not is_under(key, RESUME_MAY_CHANGE)}
    if run.sites:
        lasting |= {f"sites.{site.name}.batch": site.batch for site in run.sites}
    return lasting | {f"extend {name}": f"sha256 {sum_}" for name, sum_ in run.extend.checksums.items()}


def config_sha256(run: RunConfig) -> str:
    """Return a checksum of the run file without the keys that may change."""
    values = {key: value for key, value in lasting_values(run).items() if key not in ADDED or value != ADDED[key]}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def is_under(key: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if the dotted key is one of `prefixes`, or in a table that one of them names."""
    return f"{key}.".startswith(tuple(f"{prefix}." for prefix in prefixes))


def check_repeatable(run: RunConfig, source: object) -> None:
    """Raise UserError if nothing can run `run`, which `source` names, a second time to the same numbers."""
    if "sync=async" in run.plan.replace(" ", ""):
        raise UserError(
            f"{source}: with plan.sync = async gradients come in another order each time, and steps give other numbers "
            "again. There is nothing to compare."
        )
    if run.sites:
        raise UserError(
            f"{source}: the run has [[sites]], and what a site does follows from what the others send, so it cannot be "
            "repeated alone. Leave the sites out to try its model, data and plan."
        )
    for own in run.not_deterministic:
        raise UserError(
            f"{source}: the {own} ({own.place}) is declared not deterministic, so the same steps give other "
            "numbers each time. There is nothing to compare."
        )
