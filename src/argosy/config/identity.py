"""The part of a run file that a checkpoint depends on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from argosy.config.keys import dotted, flatten
from argosy.config.mup import MuPConfig
from argosy.config.schema import RunConfig

MAY_CHANGE = ("name", "plan", "model.preset", "model.weights", "train.steps", "train.minutes", "train.pause_at",
              "train.deterministic", "evaluate", "checkpoint", "launch", "resilience", "observe",
              "data.prepare", "data.on_bad_shard", "data.cache", "site", "sites", "sync.servers", "sync.shards",
              "sync.server_launch",
              "sync.max_staleness", "sync.staleness_rate",
              "extend")  # fmt: skip
"""Keys that a resumed run may change: they affect neither what the checkpoint means nor the order of the samples."""


ADDED = {
    "model.qkv_bias": False,
    "model.ffn_gate": True,
    "train.loss": "cross_entropy",
    "train.batch_ramp": [],
    "sync.local_steps": 1,
    "sync.momentum_every": 0,
    **{f"model.mup.{name}": 0 for name in MuPConfig.model_fields},
}
"""Keys that older versions did not have, with the value that says what these did: it is left out, as they left it."""


def lasting_values(run: RunConfig) -> dict[str, Any]:
    """Return dotted key -> value for all keys except those that may change.

    Code of the user's counts by its checksum, wherever it lies.
    """
    values = {dotted(key): value for key, value in flatten(run.model_dump(mode="json"), RunConfig).items()}
    lasting = {key: value for key, value in values.items() if not is_under(key, MAY_CHANGE)}
    if run.sites:
        lasting |= {f"sites.{site.name}.batch": site.batch for site in run.sites}
    return lasting | {f"extend {name}": f"sha256 {sum_}" for name, sum_ in run.extend.checksums.items()}


def config_sha256(run: RunConfig) -> str:
    """Return a checksum of the run file without the keys that may change."""
    values = {key: value for key, value in lasting_values(run).items() if key not in ADDED or value != ADDED[key]}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def is_under(key: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if the dotted key is one of `prefixes`, or in a table that one of them names."""
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)
