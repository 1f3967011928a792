"""What a coordinator leaves to the next: nothing that is doubtful is taken for true."""

from __future__ import annotations

import pytest

from argosy.supervise.handover import FILE, Handover

LEFT = Handover(3, "dp_replicate=2", 2, {"a": 1, "b": 1}, is_instead=True, avoided=("c",), last=("c",), doubts={"c": 3})


def test_what_was_left_is_found(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 3) == LEFT


def test_what_is_of_another_generation_is_not_taken(tmp_path):
    LEFT.save(tmp_path)
    assert Handover.load(tmp_path, 4) == Handover(4)


@pytest.mark.parametrize("text", [None, b"", b"{}", b"[]", b'{"generation": 3}', b"\xff"])
def test_what_is_missing_or_damaged_leaves_no_more_than_the_number(tmp_path, text):
    if text is not None:
        (tmp_path / FILE).write_bytes(text)
    assert Handover.load(tmp_path, 3) == Handover(3)
