"""Lines of a run's files, checked when they are read."""

from __future__ import annotations

import json

import pytest

from argosy.observe.records import (
    MOST_LINE_BYTES,
    evaluation_line,
    event_of,
    node_line,
    record_of,
    step_line,
)


def test_a_record_has_only_numbers_and_texts_that_others_can_take():
    line = b'{"a": NaN, "b": [Infinity, 1e400, 1' + b"0" * 400 + b'], "c": "x\\ud800y", "\\ud800": 17, "d": 0.1}'
    assert record_of(line) == {"a": None, "b": [None, float("inf"), None], "c": "x?y", "?": 17, "d": 0.1}
    json.dumps(record_of(line)).encode()


def test_a_record_that_is_nested_without_end_ends():
    deep = record_of(b'{"a": ' + b"[" * 600 + b"1" + b"]" * 600 + b"}")
    assert deep is not None and str(deep).count("[") < 40


@pytest.mark.parametrize(
    "line", [b'{"a": "\xed\xa0\x80"}', b"x" * 10, b"[1]", b'{"a": "' + b"x" * MOST_LINE_BYTES + b'"}']
)
def test_what_is_no_line_of_ours_is_none(line: bytes):
    assert record_of(line) is None


def test_a_wrong_value_in_a_line_of_a_step_counts_as_missing():
    line = {"step": 3, "loss": "<b>", "time_s": "<b>", "step_time_s": 0.5, "seconds": {"forward": [], "step": 0.5}}
    found = {"step": 3, "loss": None, "step_time_s": 0.5, "seconds": {"step": 0.5}}
    assert step_line(line) == found and evaluation_line(line) is None
    assert step_line({**line, "step": "3"}) is None and step_line({"step": 3, "validation_loss": 1.0}) is None
    assert evaluation_line({"step": 3, "validation_loss": 1.0}) == {"step": 3, "validation_loss": 1.0}


def test_values_by_rank_keep_their_place_beside_a_wrong_one():
    found = node_line({"time_s": 1.0, "ranks": [0, 1], "own": [[7, [0.1, "x"]]], "devices": [3, {"name": "GPU"}]})
    assert found == {"time_s": 1.0, "ranks": [0, 1], "own": [[7, [0.1, None]]], "devices": [{}, {"name": "GPU"}]}
    assert "ranks" not in node_line({"ranks": [0, 10**9]}), "tables by rank are as long as the largest"


def test_an_event_needs_what_it_is_understood_by():
    start = {"event": "start", "time_s": 1.0, "step": 0, "plan": "", "new": {"any": "thing"}}
    assert event_of(start) == start
    for wrong in ({"step": "0"}, {"time_s": -1.0}, {"time_s": 1e300}, {"event": 3}):
        assert event_of(start | wrong) is None
    assert event_of({"event": "break", "time_s": 1.0, "why": 3}) == {"event": "break", "time_s": 1.0}


def test_seconds_of_an_event_are_a_number_or_left_out() -> None:
    save = {"event": "save", "time_s": 1.0, "step": 3}
    assert event_of({**save, "seconds": "long"}) == save and event_of({**save, "seconds": 2}) == {**save, "seconds": 2}


def test_tokens_are_whole_and_an_alert_began_at_a_time_that_there_is() -> None:
    assert step_line({"loss": 1.0, "step": 1, "tokens": 1.5}) == {"loss": 1.0, "step": 1}
    assert event_of({"event": "alert", "time_s": 1.0, "since_s": float("inf")}) == {"event": "alert", "time_s": 1.0}
