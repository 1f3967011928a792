"""How far `prepare` is, in numbers and words: what is finished, under way, and done by an earlier call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from argosy.data import crew
from argosy.data.crew import Crew, Meter, PrepareProgress
from argosy.data.cutting import Journal
from argosy.data.tokenizer import EncodedBatch


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (Crew(), "0 workers"),
        (Crew(running=1), "1 worker"),
        (Crew(running=2, waiting=1), "2 workers, 1 waiting"),
        (Crew(waiting=3, why="no machine is free"), "0 workers, 3 waiting (no machine is free)"),
    ],
)
def test_workers_in_words(workers, words):
    assert str(workers) == words


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (PrepareProgress("tokenizer"), "prepare  training the tokenizer"),
        (PrepareProgress("duplicates", pieces_done=0.255), "prepare  looking for duplicates, 26%"),
        (PrepareProgress("duplicates", pieces_done=0.5, workers="2 workers"),
         "prepare  looking for duplicates, 50%   2 workers"),
        (PrepareProgress("tokens", 1_500_000, tokens=400_000, rate_bytes_per_s=2e6),
         "prepare  1.5 MB of text, 0.40M tokens   2.0 MB/s"),
        (PrepareProgress("tokens", 1_500_000, 3_000_000, underway_bytes=1_000_000, workers="1 worker"),
         "prepare  2.5/3.0 MB of text, 0.00M tokens   0.0 MB/s   1 worker"),
        (PrepareProgress("tokens", 2_900_000, 3_000_000, underway_bytes=1_000_000),
         "prepare  3.0/3.0 MB of text, 0.00M tokens   0.0 MB/s"),  # never more than there is
    ],
)  # fmt: skip
def test_progress_in_words(progress, words):
    assert str(progress) == words


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Meter, list[PrepareProgress]]:
    """A meter by a clock of the test, which tells at each change; it began at 100 s."""
    now = [100.0]
    monkeypatch.setattr(crew.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(crew, "REPORT_EVERY_S", 0.0)
    seen: list[PrepareProgress] = []
    meter = Meter(Journal(tmp_path, "job"), 1000, seen.append)
    now[0] = 102.0
    return meter, seen


def batch(*text_bytes: int) -> EncodedBatch:
    many = len(text_bytes)
    return EncodedBatch(np.zeros(5 * many, np.uint16), np.full(many, 5), np.array(text_bytes), np.zeros(many, bool))


def test_documents_are_counted_and_the_rate_is_since_the_beginning(told):
    meter, seen = told
    meter.count(batch(100, 200))
    meter.count(batch(100))
    assert (seen[-1].text_bytes, seen[-1].tokens, seen[-1].documents) == (400, 15, 3)
    assert seen[-1].rate_bytes_per_s == pytest.approx(400 / 2.0)
    meter.look(Crew(running=2, text_bytes=100))
    assert (seen[-1].underway_bytes, seen[-1].workers, seen[-1].text_bytes) == (100, "2 workers", 400)
    assert seen[-1].rate_bytes_per_s == pytest.approx(500 / 2.0)
    meter.finish()
    assert (seen[-1].stage, seen[-1].underway_bytes, seen[-1].workers) == ("done", 0, "")


def test_tokenizing_begins_once_all_was_looked_at_for_duplicates(told):
    meter, seen = told
    meter.compared(0.5)
    assert (seen[-1].stage, seen[-1].pieces_done) == ("duplicates", 0.5)
    meter.compared(1.0)
    assert meter.progress.stage == "tokens" and len(seen) == 1
    meter.count(batch(100))
    assert seen[-1].stage == "tokens" and seen[-1].rate_bytes_per_s > 1e6  # no time has gone by since then
