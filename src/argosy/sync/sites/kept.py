"""Files of past rounds in the folder of a site's exchange: which are kept, and for how long."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from argosy.sync.sites.layout import Sites


class Kept:
    """Averages are kept as long as a checkpoint of this site needs them, or another site is reading its way to now."""

    def __init__(self, sites: Sites):
        self._sites = sites
        self._readers: dict[str, tuple[int, float]] = {}

    def read(self, name: str, number: int) -> None:
        """Note that a site reads what is of a past round: it will want all that came after."""
        self._readers[name] = (number, time.monotonic())

    def sweep(self, number: int) -> None:
        """Remove what is of no use any more once the round `number` is in the ledger."""
        averages_from = 0  # a round that this site did not take part in says nothing of its checkpoints
        with suppress(OSError, ValueError, KeyError):
            averages_from = int(json.loads(self._sites.about(number).read_bytes())["needs_round"])
        states_from = number
        for first, at_s in self._readers.values():
            if time.monotonic() - at_s < self._sites.run.sync.patience_s:
                averages_from, states_from = min(averages_from, first), min(states_from, first)
        for path in self._sites.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            digits = rest[:8]
            if not digits.isdigit() or kind == "taken":
                continue
            keep_from = {"average": averages_from, "traffic": averages_from, "state": states_from}
            if int(digits) < keep_from.get(kind, number + 1):
                path.unlink(missing_ok=True)
