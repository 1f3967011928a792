"""Parts of tensors: overlaps, remainders, and wholes made of parts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from argosy.checkpoint.boxes import Box, Misfit, cover


@st.composite
def boxes(draw: st.DrawFn, whole: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in whole)
    shape = tuple(draw(st.integers(1, n - o)) for n, o in zip(whole, offset, strict=True))
    return Box("w", "float32", whole, offset, shape)


@given(st.data(), st.sampled_from([(7,), (4, 5), (3, 4, 2)]))
def test_a_whole_made_of_parts_has_each_number_once(data: st.DataObject, whole: tuple[int, ...]) -> None:
    wanted = data.draw(boxes(whole))
    held = [(i, data.draw(boxes(whole))) for i in range(data.draw(st.integers(1, 6)))]
    numbers = np.arange(np.prod(whole)).reshape(whole)
    everywhere = Box("w", "float32", whole, (0,) * len(whole), whole)
    got = cover(wanted, held)
    has = np.zeros(whole, bool)
    for _, box in held:
        has[box.within(everywhere)] = True
    complete = has[wanted.within(everywhere)].all()
    assert isinstance(got, Misfit) != complete
    if isinstance(got, Misfit):
        return
    out = np.full(wanted.shape, -1)
    for holder, box, part in got:
        assert box == dict(held)[holder]
        target = out[part.within(wanted)]
        assert (target == -1).all()
        target[...] = numbers[box.within(everywhere)][part.within(box)]
    assert (out == numbers[wanted.within(everywhere)]).all()


def test_scalars_and_empty_boxes() -> None:
    scalar = Box("step", "float32", (), (), ())
    assert cover(scalar, [("a", scalar), ("b", scalar)]) == [("a", scalar, scalar)]
    empty = Box("w", "float32", (4, 2), (4, 0), (0, 2))
    assert cover(empty, []) == []


def test_why_a_box_cannot_be_had() -> None:
    wanted = Box("w", "float32", (4,), (0,), (4,))
    half = Box("w", "float32", (4,), (0,), (2,))
    assert str(cover(wanted, [])) == "w is not there"
    assert str(cover(wanted, [("a", half)])) == "w lacks 2 of its 4 numbers there"
    assert str(cover(wanted, [("a", Box("w", "float32", (8,), (0,), (8,)))])) == "w is [8] there and [4] here"
