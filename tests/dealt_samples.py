"""What the ledger of a run over sites says of samples: each is trained on once, or is still to come."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.sync.deal import Shares, merged
from argosy.sync.ledger import Line, dealt_in


def assert_each_sample_once(shares: Shares, lines: Sequence[Line]) -> None:
    """Check that no sample was trained on twice, and that none up to the last one that was dealt out is lost."""
    trained = [some for line in lines for ranges in line.samples.values() for some in ranges]
    later = [dealt_in(shares, lines, len(lines) + n) for n in range(shares.ahead)]
    coming = [some for dealt in later for ranges in dealt.values() for some in ranges]
    whole = [*trained, *coming, *(lines[-1].returned if lines else [])]
    joined = merged(whole)
    assert sum(end - first for first, end in whole) == sum(end - first for first, end in joined), "one twice"
    assert joined == [(0, shares.start(len(lines) + shares.ahead) * shares.global_batch)], "one is lost"
