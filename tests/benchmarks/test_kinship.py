"""`benchmarks/planner/kinship.py`: what measured rows say about others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

PLANNER = Path(__file__).parents[2] / "benchmarks/planner"


@pytest.fixture
def planner(monkeypatch, tmp_path):
    """The folder's modules, which import each other by name, and the first of its rows: to read all takes seconds."""
    monkeypatch.syspath_prepend(PLANNER)
    header, first = (PLANNER / "published.csv").read_text().splitlines()[:2]
    (tmp_path / "first.csv").write_text(f"{header}\n{first}\n")
    import kinship
    import rows

    yield kinship, rows.read(tmp_path / "first.csv")[0][0]
    for name in ("kinship", "rows", "systems"):
        sys.modules.pop(name, None)


def test_rows_that_have_more_in_common_are_expected_to_err_more_alike(planner):
    kinship, row = planner
    rows = [row, replace(row, model="other"), replace(row, model="other", source="other")]
    rows += [replace(row, family="other", source="other"), row]
    known = np.array([False, False, False, False, True])
    expected = kinship.expected_errors(rows, np.zeros((5, 1)), np.array([0, 0, 0, 0, 0.1]), known)
    assert 0.1 > expected[0] > expected[1] > expected[2] > 0
    assert expected[3] == 0


@pytest.mark.slow
def test_an_outlier_among_many_hardly_counts(planner):
    kinship, row = planner
    errors = np.array([0.1] * 6 + [2.0, 0.0])
    known = np.array([True] * 7 + [False])
    expected = kinship.expected_errors([row] * 8, np.zeros((8, 1)), errors, known)
    assert expected[-1] == pytest.approx(0.1, abs=0.04)


def test_what_a_constant_changes_is_learnt_apart_from_what_rows_share(planner):
    kinship, row = planner
    slopes = np.array([[0.2], [-0.2], [0.2], [0.0]])
    known = np.array([True, True, False, False])
    expected = kinship.expected_errors([row] * 4, slopes, np.array([0.2, -0.2, 0, 0]), known)
    assert expected[2] == pytest.approx(0.2, abs=0.05)
    assert expected[3] == pytest.approx(0, abs=0.01)
