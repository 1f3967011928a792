"""Categories add up to the total, row by row, whichever rows are taken."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from argosy.plan.cost.memory_model import Footprint

COLUMNS = Footprint(*(np.arange(4.0) * 10**place for place, _ in enumerate(fields(Footprint))))


def test_categories_of_a_row_add_up_to_its_total():
    for row in range(4):
        parts = COLUMNS.by_category(row)
        assert list(parts) == [f.name for f in fields(Footprint)]
        assert sum(parts.values()) == pytest.approx(COLUMNS.total[row])


@pytest.mark.parametrize("chosen", [np.array([True, False, True, False]), np.array([0, 2])], ids=["mask", "numbers"])
def test_rows_are_those_that_are_chosen(chosen):
    assert COLUMNS.rows(chosen).total.tolist() == COLUMNS.total[[0, 2]].tolist()
