"""What a coordinator leaves to the next: nothing uncertain is taken for true."""

from __future__ import annotations

import json

import pytest

from argosy.supervise.handover import FILE, OLD_NAMES, Handover

LEFT = Handover(
    3, "dp_replicate=2", 2, {"a": 1, "b": 1}, is_instead=True, avoided=("c",), last=("c",), suspicions={"c": 3}
)


def test_a_handover_is_read_as_it_was_written(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 3) == LEFT


def test_a_handover_of_another_generation_is_ignored(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 4) == Handover(4)


@pytest.mark.parametrize("text", [None, b"", b"{}", b"[]", b'{"generation": 3}', b"\xff"])
def test_a_missing_or_damaged_handover_keeps_only_the_generation(tmp_path, text):
    if text is not None:
        (tmp_path / FILE).write_bytes(text)
    assert Handover.load(tmp_path, 3) == Handover(3)


def test_what_an_older_version_left_is_understood(tmp_path):
    record = json.loads((LEFT.save(tmp_path), (tmp_path / FILE).read_text())[1])
    for new, old in OLD_NAMES.items():
        record[old] = record.pop(new)
    (tmp_path / FILE).write_text(json.dumps(record))
    assert Handover.load(tmp_path, LEFT.generation) == LEFT
