"""The share of numbers that is sent falls from a quarter to `sync.density`, by the same factor in each step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from argosy.config.sync import SyncConfig
from argosy.sync.compressors import FIRST_DENSITY, density_at


def test_without_steps_to_fall_in_it_is_the_same_in_all() -> None:
    assert {density_at(step, SyncConfig(density=0.02)) for step in (0, 1, 1000)} == {0.02}


@pytest.mark.parametrize("exact_steps", [0, 7])
def test_it_falls_by_the_same_factor_in_each_step(exact_steps: int) -> None:
    settings = SyncConfig(density=0.01, density_steps=10, exact_steps=exact_steps)
    shares = [density_at(exact_steps + step, settings) for step in range(13)]
    assert shares[0] == pytest.approx(FIRST_DENSITY) and shares[10:] == pytest.approx([0.01] * 3)
    assert [b / a for a, b in pairwise(shares[:11])] == pytest.approx([25 ** (-1 / 10)] * 10)


def test_a_density_above_the_first_one_stays() -> None:
    assert density_at(3, SyncConfig(density=0.4, density_steps=10)) == 0.4
