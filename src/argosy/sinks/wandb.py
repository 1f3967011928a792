"""Weights & Biases, online or into a folder for `wandb sync`.

A row of W&B's history is a step of the run. W&B takes steps in order and ignores earlier ones, so steps that are lost
and run again are taken back with its own rewind (`resume_from`). A run that goes on is the same W&B run.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import wandb

from argosy.sinks.sink import About, Record, Sink, is_noteworthy


class Wandb(Sink):
    """Logs a run to W&B. State: `id`, `next_step`, and `is_open` while a process has it."""

    def __init__(self, about: About):
        super().__init__(about)
        self._settings = about.config["observe"]["wandb"]
        self._last: int = self.state.setdefault("next_step", 0) - 1
        if self.state.get("is_open") and self._last >= 0 and self._settings["mode"] == "offline":
            self._run = self._rewound(self._last)  # its process was ended: rows may be there that it has not noted
        else:
            self._run = self._begin(id=self.state.setdefault("id", _new_id()), resume="allow")
        self.state["is_open"] = True

    def numbers(self, lines: Sequence[tuple[Record, dict[str, float]]]) -> None:
        for record, values in lines:
            self._log(values, max(self._last, record["step"]))  # an evaluation may come late

    def events(self, records: Sequence[Record]) -> None:
        """Add what happened to the row of the newest step, as text."""
        for record in filter(is_noteworthy, records):
            self._log({"event": json.dumps(record)}, max(self._last, 0))

    def samples(self, records: Sequence[Record]) -> None:
        """Add texts to the row of the newest step: they are written later than their own."""
        for record in records:
            text = {"sample/step": record["step"], "sample/text": record["prompt"] + record["text"]}
            self._log(text, max(self._last, record["step"]))

    def rewind(self, step: int) -> None:
        """Have W&B drop `step` and later; if that cannot be, go on as another run of the group."""
        self._run.finish()
        self._run = self._rewound(step - 1)

    def close(self, report: Record | None) -> None:
        if report is not None:
            self._run.summary.update({"report": report})
        self._run.finish()
        self.state["is_open"] = False

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)
        self._last = max(self._last, step)
        self.state["next_step"] = self._last + 1

    def _rewound(self, last: int) -> wandb.Run:
        """Return the run with `last` as its last step."""
        self._last = last
        self.state["next_step"] = last + 1
        if last >= 0:
            try:
                return self._begin(resume_from=f"{self.state['id']}?_step={last}")
            except wandb.Error:  # a server that cannot rewind
                pass
        self.state["id"] = _new_id()
        return self._begin(id=self.state["id"], resume="allow")

    def _begin(self, **which: Any) -> wandb.Run:
        settings = {"base_url": self._settings["url"]} if self._settings["url"] else {}
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, **settings)
        return wandb.init(
            project=self._settings["project"],
            entity=self._settings["entity"],
            group=self._settings["group"] or self.about.name,
            tags=list(self._settings["tags"]),
            mode=self._settings["mode"],
            name=self.about.name,
            dir=str(self.about.folder),
            config={**self.about.config, "argosy_plan": self.about.plan},
            settings=quiet,
            **which,
        )


def _new_id() -> str:
    return uuid.uuid4().hex[:8]
