from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.permutation import key_of, permute


def permuted(n: int, key: int) -> list[int]:
    return permute(np.arange(n, dtype=np.uint64), n, np.full(n, key, np.uint64)).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_is_a_bijection(n: int, key: int) -> None:
    assert sorted(permuted(n, key)) == list(range(n))


@given(st.integers(1, 2**63), st.data())
def test_stays_in_range_and_apart_at_any_size(n: int, data: st.DataObject) -> None:
    index = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=50)))
    where = permute(np.array(index, np.uint64), n, np.full(len(index), 7, np.uint64)).tolist()
    assert len(set(where)) == len(index) and all(0 <= place < n for place in where)


def test_elements_are_permuted_by_their_own_key() -> None:
    keys = np.array([1, 2, 1, 3], np.uint64)
    together = permute(np.array([5, 5, 6, 5], np.uint64), 1000, keys)
    alone = [
        permute(np.array([i], np.uint64), 1000, np.array([k], np.uint64))[0]
        for i, k in zip([5, 5, 6, 5], keys, strict=True)
    ]
    assert together.tolist() == alone and together[0] != together[1]


def test_looks_random() -> None:
    """Displacements of neighbours, fixed points and rank correlation are those of a random permutation."""
    n = 20_000
    where = np.array(permuted(n, key_of(1)), np.float64)
    assert abs(np.corrcoef(np.arange(n), where)[0, 1]) < 4 / n**0.5
    assert abs(np.corrcoef(where[:-1], where[1:])[0, 1]) < 4 / n**0.5
    assert np.sum(where == np.arange(n)) < 10


def test_every_place_is_as_likely_for_small_domains() -> None:
    n, keys = 5, 20_000
    where = permute(np.full(keys, 2, np.uint64), n, np.arange(keys, dtype=np.uint64))
    counts = np.bincount(where.astype(np.int64), minlength=n)
    assert np.abs(counts - keys / n).max() < 5 * (keys / n) ** 0.5


def test_keys_depend_on_every_part() -> None:
    keys = {key_of(0, "a"), key_of(0, "b"), key_of(1, "a"), key_of(2**200, "a"), key_of(0, "a", 0)}
    assert len(keys) == 5
