"""Large numbers as people type them."""

import pytest

from argosy.config.counts import count_of


@pytest.mark.parametrize(
    ("word", "count"),
    [
        ("30k", 30_000),
        ("161B", 161_000_000_000),
        ("161b", 161_000_000_000),
        ("1T", 10**12),
        ("4.1M", 4_100_000),
        ("14.8T", 14_800_000_000_000),
        ("1e6", 1_000_000),
        ("1_000", 1000),
        ("-3k", -3000),
        (".5", 0.5),
        ("0.0015k", 1.5),
    ],
)
def test_a_count_is_the_number_that_it_says(word, count):
    found = count_of(word)
    assert found == count and type(found) is type(count)


@pytest.mark.parametrize("word", ["", "k", "1X", "1kk", "T1", "1 2", "1e999"])
def test_what_is_no_number_is_refused(word):
    with pytest.raises(ValueError, match=r"is no number|is too large"):
        count_of(word)
