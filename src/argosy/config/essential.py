"""The keys that everybody needs first. `--help` shows these; `--help-all` and `argosy config show` show all."""

from __future__ import annotations

from argosy.config.keys import Key, key_of

ESSENTIAL: tuple[Key, ...] = tuple(
    map(
        key_of,
        (
            "name",
            "model.preset",
            "model.weights",
            "data.prepare.input",
            "data.sources",
            "data.seq_len",
            "train.global_batch",
            "train.steps",
            "train.minutes",
            "optimizer.lr",
            "evaluate.every_steps",
            "checkpoint.every_steps",
            "plan",
            "launch.processes",
            "seed",
        ),
    )
)
"""In the order of --help. Their meanings begin with the words that people search for (`config.schema`)."""
