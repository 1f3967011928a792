"""Decorators refuse wrong arguments when the file is read, and remember functions by their module."""

from __future__ import annotations

import math
import re

import pytest

from argosy import extend
from argosy.extend.register import DECORATORS, registered_by


@pytest.mark.parametrize(
    ("decorator", "given", "more", "said"),
    [
        ("callback", "after_stp", {}, "there is no point 'after_stp'; did you mean after_step?"),
        ("callback", "end", {"strict": 1}, "strict = 1 must be True or False"),
        ("metric", "m", {"reduce": "max"}, 'reduce = \'max\' must be "mean" or "sum"'),
        ("metric", "1m", {}, "'1m' is no name"),
        ("metric", "m" * 65, {}, "is no name"),
        ("loss", "l", {"deterministic": None}, "deterministic = None must be True or False"),
        ("optimizer", "o", {"moments": "m"}, "must be names"),
        ("optimizer", "o", {"moments": ("m", "m")}, "must be different names"),
        ("optimizer", "o", {"moments": ("step",)}, "none of them step"),
        ("family", "f", {"architecture": "X"}, "architecture and hidden_act belong together"),
    ],
)
def test_wrong_arguments_are_refused(decorator, given, more, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        DECORATORS[decorator](given, **more)


def test_functions_and_classes_are_remembered_in_order_and_stay_as_they_are():
    @extend.metric("ours", reduce="sum")
    def measure(run):
        return math.nan

    @extend.callback("save")
    def saved(run): ...

    @extend.sink("there")
    class Sink: ...

    found = registered_by(__name__)
    assert list(found.items()) == [
        (("metric", "ours", ""), measure), (("callback", "saved", "save"), saved), (("sink", "there", ""), Sink),
    ]  # fmt: skip
    assert math.isnan(measure(None)) and not registered_by("no.such.module")


@pytest.mark.parametrize(("kind", "arguments"), [("callback", 1), ("metric", 1), ("loss", 2), ("sink", 0)])
def test_the_number_of_arguments_is_known(kind, arguments):
    registration = DECORATORS[kind]("end" if kind == "callback" else "name")
    assert (registration.kind, registration.arguments) == (kind, arguments)
