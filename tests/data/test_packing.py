from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from argosy.data.packing import ID_MASK, IGNORED, START_BIT, TRAINED, Packer, is_packed, unpack
from chats import SEQ_LEN, conversations, rows_of


@given(st.lists(st.integers(1, 32), min_size=1, max_size=600))
def test_every_unit_is_in_one_row_and_rows_are_full(lengths: list[int]) -> None:
    units = [np.full(length, START_BIT | number, np.int32) for number, length in enumerate(lengths)]
    packer = Packer(32, filler=999)
    rows = [row for unit in units for row in packer.add(unit)] + packer.flush()
    assert all(sum(map(len, row)) == 32 for row in rows)
    found = sorted(int(unit[0]) & ID_MASK for row in rows for unit in row)
    assert found == list(range(len(lengths)))
    for row in rows:
        for unit in row:
            length = lengths[int(unit[0]) & ID_MASK]
            rest = unit[length:]  # a filling is a sequence of its own
            assert not len(rest) or (rest[0] == 999 | START_BIT and (rest[1:] == 999).all())


def test_rows_have_little_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 5000).clip(10, 2048).astype(int)
    packer = Packer(2048, filler=0)
    rows = [row for n in lengths for row in packer.add(np.ones(n, np.int32))] + packer.flush()
    assert lengths.sum() / (2048 * len(rows)) > 0.95


def test_targets_are_answers_of_the_same_conversation() -> None:
    units = conversations(60)
    rows = rows_of(units)
    assert is_packed(rows)
    tokens, targets, positions = unpack(rows)
    learned = sorted(t for unit in units for t in (unit[unit & TRAINED != 0] & ID_MASK).tolist())
    assert sorted(targets[targets != IGNORED].tolist()) == learned
    starts = positions == 0
    np.testing.assert_array_equal(starts, rows[:, :-1] & START_BIT != 0)
    assert (positions[:, 1:][~starts[:, 1:]] == positions[:, :-1][~starts[:, 1:]] + 1).all()
    assert (targets[:, :-1][starts[:, 1:]] == IGNORED).all()
    assert (targets[:, -1] == IGNORED).all()
    np.testing.assert_array_equal(tokens, rows[:, :SEQ_LEN] & ID_MASK)
