from __future__ import annotations

import math

import numpy as np
import pytest

from argosy.observe.records import record_of
from argosy.watch import columns
from argosy.watch.columns import Columns, Line, rows_of


def grown(*batches: list[Line]) -> Columns:
    table = Columns()
    for lines in batches:
        table.append(rows_of(lines))
    return table


def test_a_number_is_found_under_its_path() -> None:
    rows = rows_of([{"step": 0, "seconds": {"forward": 1.5, "deep": {"er": 2}}, "name": "text", "list": [1, 2]}])
    assert {key: list(values) for key, values in rows.items()} == {
        "step": [0], "seconds.forward": [1.5], "seconds.deep.er": [2],
    }  # fmt: skip


def test_seconds_and_bytes_of_communication_are_columns() -> None:
    rows = rows_of([{"step": 0, "communication": {"tp": {"node": [0.5, 100]}}}])
    assert rows["communication.tp.node.0"] == [0.5]
    assert rows["communication.tp.node.1"] == [100]


@pytest.mark.parametrize("others", [[[2.0, 3]], [None], ["text", [2.0]], [[2.0, 3, 4]]], ids=str)
def test_a_list_is_read_whatever_other_lines_have(others: list[object]) -> None:
    of_node = [[0.5, 100], *others]
    rows = rows_of([{"step": n, "communication": {"tp": {"node": value}}} for n, value in enumerate(of_node)])
    expected = [value[0] if isinstance(value, list) else np.nan for value in of_node]
    np.testing.assert_array_equal(rows["communication.tp.node.0"], expected)


def test_a_key_that_begins_late_or_ends_is_nan_where_it_is_missing() -> None:
    table = grown([{"step": 0, "a": 1}], [{"step": 1, "b": 2}, {"step": 2, "a": None, "b": 3}])
    np.testing.assert_array_equal(table["a"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(table["b"], [np.nan, 2, 3])
    np.testing.assert_array_equal(table["never"], [np.nan] * 3)


@pytest.mark.parametrize("value", ["text", {"x": 1}, [1, 2], [[1]], 10**400])
def test_a_value_of_another_kind_in_one_line_spoils_no_other_line(value: object) -> None:
    rows = rows_of(
        [{"step": 0, "seconds": {"a": 1.0}}, {"step": 1, "seconds": value}, {"step": 2, "seconds": {"a": 2}}]
    )
    np.testing.assert_array_equal(rows["seconds.a"], [1, np.nan, 2])


def test_steps_that_are_run_again_replace_those_that_were_lost() -> None:
    table = grown([{"step": s, "loss": s} for s in range(10)], [{"step": 6, "loss": 60}, {"step": 7, "loss": 70}])
    assert list(table["step"]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert list(table["loss"][-3:]) == [5, 60, 70]


def test_going_back_within_one_read_counts_the_same() -> None:
    steps = [0, 1, 2, 3, 1, 2, 5]
    table = grown([{"step": step, "at": n} for n, step in enumerate(steps)])
    assert list(table["step"]) == [0, 1, 2, 5]
    assert list(table["at"]) == [0, 4, 5, 6]


def test_a_key_that_ended_before_a_cut_leaves_nothing_behind() -> None:
    table = grown([{"step": s, "old": 1.0} for s in range(100)], [{"step": 50, "new": 2.0}, {"step": 51, "new": 2.0}])
    assert np.isnan(table["old"][50:]).all()
    assert len(table["old"]) == len(table["new"]) == 52


def test_growing_keeps_what_is_there() -> None:
    table = Columns()
    for step in range(1000):
        table.append(rows_of([{"step": step, "twice": 2 * step}]))
    np.testing.assert_array_equal(table["twice"], 2 * np.arange(1000))


def test_slices_are_by_step() -> None:
    table = grown([{"step": step} for step in range(0, 100, 10)])
    assert table["step"][table.since(45)].tolist() == [50, 60, 70, 80, 90]
    assert table["step"][table.between(20, 40)].tolist() == [20, 30, 40]
    assert table["step"][table.between(None, 5)].tolist() == [0]
    assert table["step"][table.between(55, 51)].tolist() == []


def test_a_group_is_loaded_when_a_key_of_it_is_asked_for() -> None:
    asked = []
    table = Columns(asked.append)
    table.append(rows_of([{"step": 0}, {"step": 3}, {"step": 7}]))
    assert np.isnan(table["seconds.forward"]).all()
    assert asked == ["seconds"]
    table.put(np.array([7.0, 3.0, 3.0, 5.0]), {"seconds.forward": np.array([1.0, 2.0, 4.0, 9.0])})
    np.testing.assert_array_equal(table["seconds.forward"], [np.nan, 4, 1])  # the last of equal steps; 5 is none


def test_a_foreign_file_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST_NUMBERS", 1000)
    table = grown([{"step": step, **{f"key{n}": 1.0 for n in range(200)}} for step in range(10)])
    assert table.nbytes < 200 * 8 * 100
    assert table.left_out


@pytest.mark.parametrize("line", [b"{", b'"text"', b"[1]", b'{"a": "\xff"}', b"null", b"[" * 100_000, b"\x00"])
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert record_of(line) is None


def test_a_number_that_json_has_no_word_for_is_read_as_python_writes_it() -> None:
    (loss,) = rows_of([record_of(b'{"loss": NaN}') or {}])["loss"]
    assert math.isnan(loss)
