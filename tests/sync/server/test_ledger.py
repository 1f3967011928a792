"""The ledger of updates: what is in it, and what is forgotten when the servers go back."""

from __future__ import annotations

import json

import pytest

from argosy.sync.deal import AppliedUpdate
from argosy.sync.ledger import UpdateLedger


def test_it_is_read_as_it_was_written_and_turned_back(tmp_path):
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    updates = [AppliedUpdate(0, 0, "A", 0), AppliedUpdate(1, 2, "B", 0), AppliedUpdate(2, 3, "A", 1)]
    ledger.add(updates[0], 8, loss=3.0)
    ledger.skip(1, "B", "loss nan")
    for update in updates[1:]:
        ledger.add(update, 8)
    ledger.sync()

    again = UpdateLedger(tmp_path)
    assert again.turn_back(2) == 1
    assert again.updates == updates[:2]
    assert again.skipped == [(1, 1)]
    lines = [json.loads(line) for line in again.path.read_text().splitlines()]
    assert lines[0] == {"update": 0, "item": 0, "samples": [[0, 8]], "site": "A", "version": 0, "staleness": 0,
                        "loss": 3.0}  # fmt: skip
    assert [line.get("update") for line in lines] == [0, None, 1]


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    ledger.add(AppliedUpdate(0, 0, "A", 0), 8)
    with ledger.path.open("ab") as file:
        file.write(b'{"update": 1, "item')
    ledger.turn_back(1)
    assert len(ledger.updates) == 1


def test_a_ledger_that_lacks_updates_of_a_checkpoint_is_refused(tmp_path):
    ledger = UpdateLedger(tmp_path)
    ledger.turn_back(0)
    ledger.add(AppliedUpdate(0, 0, "A", 0), 8)
    with pytest.raises(ValueError, match="first 2 updates"):
        ledger.turn_back(2)
