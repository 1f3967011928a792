"""How far a `prepare` is: what it reports, and the meter that counts finished work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from argosy.data.crew import Crew
from argosy.data.engine import EncodedBatch
from argosy.data.journal import Journal

REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of `prepare`."""

    stage: Literal["tokenizer", "duplicates", "tokens", "done"]
    """The phase: training the tokenizer, looking for duplicates, tokenizing, or finished."""
    text_bytes: int = 0
    """UTF-8 bytes of text tokenized so far."""
    total_text_bytes: int | None = None
    """Bytes in all; None if that is not known before the input is read."""
    tokens: int = 0
    documents: int = 0
    rate_bytes_per_s: float = 0.0
    """Text tokenized per second since `prepare` was called, without the work of an interrupted call before."""
    underway_bytes: int = 0
    """Text that workers have tokenized and not delivered."""
    workers: str = ""
    """The workers, in words."""
    pieces_done: float = 0.0
    """duplicates: share of the input that was looked at."""

    def __str__(self) -> str:
        if self.stage == "tokenizer":
            return "prepare  training the tokenizer"
        if self.stage == "duplicates":
            return f"prepare  looking for duplicates, {self.pieces_done:.0%}" + (
                f"   {self.workers}" if self.workers else ""
            )
        total = f"/{self.total_text_bytes / 1e6:.1f}" if self.total_text_bytes else ""
        done = min(self.text_bytes + self.underway_bytes, self.total_text_bytes or sys.maxsize)
        return (
            f"prepare  {done / 1e6:.1f}{total} MB of text, "
            f"{self.tokens / 1e6:.2f}M tokens   {self.rate_bytes_per_s / 1e6:.1f} MB/s"
            + (f"   {self.workers}" if self.workers else "")
        )


Report = Callable[[PrepareProgress], None]


class Meter:
    """Counts finished work and reports it."""

    def __init__(self, journal: Journal, total_text_bytes: int | None, report: Report):
        done = [shard for cut in journal.cuts for shard in cut.shards.values()]
        self._report, self._began_s, self._reported_s = report, time.monotonic(), -REPORT_EVERY_S
        self._earlier_bytes = sum(shard.text_bytes for shard in done)
        self.progress = PrepareProgress(
            stage="tokens",
            text_bytes=self._earlier_bytes,
            total_text_bytes=total_text_bytes,
            tokens=sum(shard.tokens for shard in done),
            documents=sum(shard.documents for shard in done),
        )

    def count(self, batch: EncodedBatch) -> None:
        """Add documents that are in a shard."""
        old = self.progress
        self._show(
            replace(
                old,
                text_bytes=old.text_bytes + int(batch.text_bytes.sum()),
                tokens=old.tokens + len(batch.tokens),
                documents=old.documents + len(batch.lengths),
            )
        )

    def compared(self, share: float) -> None:
        """Show how much of the input was looked at for duplicates; after all of it, tokenizing begins."""
        if share < 1.0:
            self._show(replace(self.progress, stage="duplicates", pieces_done=share))
        else:
            self.progress = replace(self.progress, stage="tokens")
            self._began_s = time.monotonic()

    def look(self, crew: Crew) -> None:
        """Show how many workers there are, and what they are at."""
        self._show(replace(self.progress, underway_bytes=crew.text_bytes, workers=str(crew)))

    def finish(self) -> None:
        """Report that the work is finished."""
        self._report(replace(self.progress, stage="done", underway_bytes=0, workers=""))

    def _show(self, progress: PrepareProgress) -> None:
        now_s = time.monotonic()
        done = progress.text_bytes + progress.underway_bytes - self._earlier_bytes
        self.progress = replace(progress, rate_bytes_per_s=done / max(now_s - self._began_s, 1e-9))
        if now_s - self._reported_s >= REPORT_EVERY_S:
            self._reported_s = now_s
            self._report(self.progress)
