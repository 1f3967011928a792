"""The ledger of an asynchronous run: a line for each update, and for each batch that no update is made from.

It is `ledger.jsonl` in the folder of the whole run. A run that goes on from a checkpoint of version v forgets the lines
of update v and later ones: what they were made from is dealt out again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from argosy.files import atomic_write, make_folder
from argosy.sync.server.dealing import AppliedUpdate

NAME = "ledger.jsonl"


class UpdateLedger:
    """The ledger in `run_dir`; one process writes it."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / NAME
        self.updates: list[AppliedUpdate] = []
        self.skipped: list[tuple[int, int]] = []
        """Items that no update is made from, and after how many updates that was found."""

    def turn_back(self, version: int) -> int:
        """Read the lines of the first `version` updates, and forget those after them.

        Returns how many updates are forgotten. Raises: ValueError if lines of these are missing.
        """
        kept: list[dict[str, Any]] = []
        self.updates, self.skipped = [], []
        forgotten = 0
        for line in self._lines():
            if "skipped" in line and int(line["version"]) < version:
                self.skipped.append((int(line["skipped"]), int(line["version"])))
                kept.append(line)
            elif "update" in line and int(line["update"]) < version:
                self.updates.append(AppliedUpdate.from_json(line))
                kept.append(line)
            else:
                forgotten += "update" in line
        if [update.update for update in self.updates] != list(range(version)):
            raise ValueError(f"{self.path}: it has no line for each of the first {version} updates")
        make_folder(self.path.parent)
        with atomic_write(self.path) as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        return forgotten

    def add(self, update: AppliedUpdate, item_samples: int, **facts: float) -> None:
        """Add the line of an update. item_samples: of each item (`Dealing`)."""
        self.updates.append(update)
        self._append(update.to_json(item_samples) | facts)

    def skip(self, item: int, site: str, why: str) -> None:
        """Add the line of an item that no update is made from."""
        self.skipped.append((item, len(self.updates)))
        self._append({"skipped": item, "version": len(self.updates), "site": site, "why": why})

    def sync(self) -> None:
        """Wait until all lines are on the disk: a checkpoint that follows relies on them."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def _lines(self) -> list[dict[str, Any]]:
        """Return all whole lines; the last one is cut off if its writer was killed."""
        if not self.path.exists():
            return []
        whole = self.path.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]
