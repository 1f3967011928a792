"""One of two sites that have gone apart gives way, and never both, whatever each heard too late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.sync.messages import FROM_SITE, Standing, StandingNotice, gives_way, packed, unpacked

NAMES = ("A", "B")
TOKENS = st.integers(0, 5)


def test_what_is_said_is_understood() -> None:
    said = StandingNotice(standing=Standing(rounds=3, chain="c" * 16, tokens=12, reached=2, adopts=True))
    assert unpacked(packed(said), FROM_SITE) == (said, b"")


@given(TOKENS, TOKENS)
def test_one_gives_way(a: int, b: int) -> None:
    assert gives_way("A", Standing(tokens=a), "B", Standing(tokens=b), NAMES) != gives_way(
        "B", Standing(tokens=b), "A", Standing(tokens=a), NAMES
    )


@given(TOKENS, TOKENS, TOKENS)
def test_who_stands_still_since_it_gave_way_is_not_given_way_to(a: int, later: int, b: int) -> None:
    if gives_way("B", Standing(tokens=b), "A", Standing(tokens=a), NAMES):
        assert not gives_way("A", Standing(tokens=a + later), "B", Standing(tokens=b), NAMES)
