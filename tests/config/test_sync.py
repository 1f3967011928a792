"""Turns of fragments that do not come out even, and quorums that no sites make up, are refused, with what would do."""

from __future__ import annotations

import pytest

from argosy.config.sync import OuterConfig, SiteConfig, check_fragments, check_sites


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"every_steps": 50, "fragments": 4}, "try every_steps = 48"),
        ({"every_steps": 50, "fragments": 10}, "try 8 or less"),
        ({"every_steps": 48, "fragments": 4, "overlap_steps": 12}, "try 11"),
        ({"every_steps": 3, "fragments": 4}, "try every_steps = 4"),
    ],
)
def test_turns_come_out_even(keys: dict[str, int], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check_fragments(OuterConfig.model_validate(keys), layers=8)


def test_one_fragment_suits_every_model() -> None:
    check_fragments(OuterConfig(every_steps=1), layers=1)


@pytest.mark.parametrize(("names", "remedy"), [("", "leave it out"), ("AB", "try 2 or less")])
def test_a_quorum_is_of_sites_that_there_are(names: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"sync.quorum = 3 is more than there are sites; {remedy}"):
        check_sites([SiteConfig(name=name) for name in names], "", 3)
