"""Tokens are drawn as the settings say, and rows of a batch do not disturb each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from argosy.models.generate import choose, sample_rows, sample_tokens, uniform_numbers
from tiny import decoder

PROBABILITIES = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2])


def drawn(top_p: float, temperature: float = 1.0, draws: int = 1000) -> Tensor:
    """How often each token comes, of random numbers that are spread evenly."""
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    found = choose(PROBABILITIES.log().expand(draws, -1), temperature, top_p, uniform)
    return found.bincount(minlength=len(PROBABILITIES)) / draws


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, [0, 1, 3, 4]), (0.95, [0, 1, 3, 4]), (0.7, [1, 3]), (0.65, [1, 3]), (0.01, [1])]
)
def test_tokens_come_as_often_as_the_model_says_among_the_likeliest(top_p, kept):
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    torch.testing.assert_close(drawn(top_p), expected, rtol=0, atol=2e-3)


def test_temperature_flattens_and_zero_takes_the_likeliest():
    flat = PROBABILITIES.sqrt() / PROBABILITIES.sqrt().sum()
    torch.testing.assert_close(drawn(1.0, temperature=2.0), flat, rtol=0, atol=2e-3)
    assert drawn(1.0, temperature=0)[1] == drawn(1.0, temperature=1e-40)[1] == 1.0


def test_the_random_numbers_at_the_ends_give_tokens_that_may_come():
    ends = torch.tensor([0.0, 1.0 - 2**-53])
    assert choose(PROBABILITIES.log().expand(2, -1), 1.0, 0.65, ends).tolist() == [1, 3]


def test_rows_begin_after_their_prompts_and_end_at_their_limit_or_an_end():
    seen = list[list[list[int]]]()

    def next_tokens(tokens_NT: Tensor, uniform_N: Tensor) -> list[int]:
        seen.append(tokens_NT.tolist())
        return [int(10 * row + len(seen)) for row in range(1, 4)]

    steps = list(sample_rows(next_tokens, [[1], [2, 3, 4], [5]], [5, 2, 3], [0, 1, 2], {32}))
    assert steps == [[11, None, 31], [12, None, 32], [13, 23, None], [14, 24, None], [15, None, None]]
    assert seen[0] == [[1], [2], [5]] and seen[1] == [[11], [3], [31]] and seen[2] == [[12], [4], [32]]
    assert seen[3] == [[13], [23], [33]]


def test_random_numbers_follow_from_the_seed_and_a_longer_row_begins_alike():
    together = uniform_numbers([7, 8], 5)
    assert torch.equal(together[1:], uniform_numbers([8], 5)) and not torch.equal(together[0], together[1])
    assert torch.equal(uniform_numbers([7], 9)[:, :5], together[:1])


def test_a_decoder_writes_what_its_logits_say():
    model, tokens = decoder(), [3, 1, 4]
    with torch.no_grad():
        for token in sample_tokens(model, tokens, 6, temperature=0):
            assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
            tokens = [*tokens, token]
    assert len(tokens) == 9
    assert list(sample_tokens(model, [3, 1, 4], 6, temperature=0, stop=[tokens[5]])) == tokens[3:5]
    assert list(sample_tokens(model, [3, 1, 4], 0)) == []
