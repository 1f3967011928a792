"""Sums follow each other phase by phase: one may be on the thin links while the next is still inside."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch

from argosy.plan.sync import SUMS_AHEAD
from argosy.sync.compressor import Lane, Sending, Sum

PHASES = (1, 1, 1, 1)
"""Inside, across in two messages, back inside."""


class Link:
    """Messages that arrive when they are told to, or are waited for."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.arrived: set[str] = set()
        self.lane = Lane(torch.device("cpu"))

    def submit(self, name: str, phases: tuple[int, ...] = PHASES) -> Sum:
        def sending() -> Sending:
            for number in range(sum(phases)):
                yield cast(Any, Message(self, f"{name}{number}"))
            return torch.tensor(float(len(self.sent)))

        return self.lane.submit(sending(), phases)

    def arrives(self, *messages: str) -> None:
        self.arrived |= set(messages)
        self.lane.poll()


class Message:
    def __init__(self, link: Link, name: str):
        self.link, self.name = link, name
        link.sent.append(name)

    def is_completed(self) -> bool:
        return self.name in self.link.arrived

    def wait(self) -> None:
        self.link.arrived.add(self.name)


def test_a_sum_goes_inside_while_the_one_before_is_across():
    link = Link()
    link.submit("a")
    link.submit("b")
    link.submit("c")
    assert link.sent == ["a0", "b0", "c0"], "each has left the first phase behind when the next comes"
    link.arrives("b0", "c0")
    assert link.sent[3:] == [], "nothing passes what is before it"
    link.arrives("a0")
    assert link.sent[3:] == ["a1", "b1", "c1"], "the links across are busy while a waits for what is to be summed"
    link.arrives("b1")
    assert link.sent[6:] == []
    link.arrives("a1")
    assert link.sent[6:] == ["a2", "b2"]
    link.arrives("b2", "a2")
    assert link.sent[8:] == ["a3", "b3"]


def test_to_finish_one_sum_those_before_it_are_sent():
    link = Link()
    sums = [link.submit(name) for name in "ab"]
    assert link.lane.finish(sums[1]) is not None
    assert [message for message in link.sent if message[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert link.lane.finish(sums[0]) is not None


def test_sums_inside_are_waited_for_before_more_are_on_their_way_than_may_be():
    """gloo's reduce-scatters never say that they are done, and hold a bucket twice until they are waited for."""
    link = Link()
    sums = [link.submit(str(number), (1,)) for number in range(SUMS_AHEAD + 2)]
    assert link.arrived == {"00", "10"}
    assert [one.result is not None for one in sums] == [True, True] + [False] * SUMS_AHEAD
    across = Link()
    for name in "abcdef":
        across.submit(name, (0, 1))
    assert not across.arrived, "a slow link between replicas is waited for at the end"


def test_a_sum_that_was_fetched_is_nobody_s():
    link = Link()
    refs = [weakref.ref(link.submit(name, phases)) for name, phases in (("a", (1,)), ("b", (0, 1)))]
    for ref in refs:
        link.lane.finish(cast(Sum, ref()))
    assert [ref() for ref in refs] == [None, None], "its memory is free before the next step"


def test_a_sum_ends_as_soon_as_its_last_message_has_arrived():
    link = Link()
    one = link.submit("a", (1,))
    link.arrives("a0")
    assert one.result is not None, "the bucket that it had is free"


def test_a_sum_without_a_phase_opens_it_to_nobody():
    """The sum of experts, say, whose neighbours have others: what is before and after it share groups."""
    link = Link()
    link.submit("a")
    link.submit("b", (0, 1, 0, 0))
    link.submit("c")
    link.arrives("c0")
    assert link.sent == ["a0", "c0"]
    link.arrives("a0", "a1")
    assert link.sent[2:] == ["a1", "a2", "b0", "c1"]
