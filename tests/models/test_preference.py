"""Losses of preferences are those of their papers, and their gradients by token those of autograd."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.train import PreferenceConfig
from argosy.data.packing import CHOSEN_SIDE, IGNORED, REJECTED_SIDE
from argosy.models.loss import chunk_loss_and_gradient, with_misses
from argosy.models.preference import (
    PREFERENCE_LOSSES,
    Answers,
    Preference,
    Sequences,
    answer_scores,
    answer_values,
    last_tokens,
    preference_loss,
)

CHOSEN, REJECTED = -3.0, -8.0
BEFORE_CHOSEN, BEFORE_REJECTED = -2.0, -6.0
CHOSEN_TOKENS, REJECTED_TOKENS = 2, 4


def log_sigmoid(x: float) -> float:
    return -log(1 + exp(-x))


def sequences() -> Sequences:
    """A row of a pair: two tokens and an answer of two, then three and an answer of four."""
    starts = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4]])
    kinds, partners, lengths, reference = (torch.zeros_like(starts) for _ in range(4))
    kinds[0, 0], kinds[0, 4], partners[0, 0] = CHOSEN_SIDE, REJECTED_SIDE, 4
    lengths[0, 0], lengths[0, 4] = CHOSEN_TOKENS, REJECTED_TOKENS
    reference = reference.float()
    reference[0, 0], reference[0, 4] = BEFORE_CHOSEN, BEFORE_REJECTED
    return Sequences(starts, kinds, partners, lengths.float(), reference)


def sums(of: Sequences) -> Tensor:
    found = torch.zeros_like(of.reference)
    found[0, 0], found[0, 4] = CHOSEN, REJECTED
    return found


def expected(objective: str) -> float:
    ratio, other = CHOSEN - BEFORE_CHOSEN, REJECTED - BEFORE_REJECTED
    mean, mean_other = CHOSEN / CHOSEN_TOKENS, REJECTED / REJECTED_TOKENS
    if objective == "dpo":
        return -0.9 * log_sigmoid(0.5 * (ratio - other)) - 0.1 * log_sigmoid(-0.5 * (ratio - other))
    if objective == "ipo":
        return (ratio / CHOSEN_TOKENS - other / REJECTED_TOKENS - 1 / (2 * 0.5)) ** 2
    if objective == "simpo":
        return -log_sigmoid(0.5 * (mean - mean_other) - 1.0)
    if objective == "orpo":
        odds, odds_other = (log(exp(each) / (1 - exp(each))) for each in (mean, mean_other))
        return -CHOSEN * 0.25 - 0.5 * log_sigmoid(odds - odds_other)
    if objective == "kto":
        good, bad = log_sigmoid(0.5 * (ratio - 0.3)), log_sigmoid(0.5 * (0.3 - other))
        return 2.0 * (1 - exp(good)) + 3.0 * (1 - exp(bad))
    return -log_sigmoid(CHOSEN - REJECTED) + 0.01 * (CHOSEN + REJECTED) ** 2


def preference(objective: str) -> Preference:
    config = PreferenceConfig(
        beta=0.5, label_smoothing=0.1, desirable_weight=2.0, undesirable_weight=3.0, centring=0.01
    )
    made = Preference(objective, config)
    made.per_token, made.kl = 0.25, 0.3
    return made


@pytest.mark.parametrize("objective", PREFERENCE_LOSSES)
def test_a_loss_is_that_of_its_paper(objective: str) -> None:
    of = sequences()
    assert preference(objective)(sums(of), of).item() == pytest.approx(expected(objective), rel=1e-5)


def test_statistics_are_summed_until_they_are_taken() -> None:
    made, of = preference("dpo"), sequences()
    assert made.take_statistics() is None
    for _ in range(2):
        made(sums(of), of)
    rewards = 0.5 * (CHOSEN - BEFORE_CHOSEN), 0.5 * (REJECTED - BEFORE_REJECTED)
    assert made.take_statistics().tolist() == [2, 2, 2, 2 * rewards[0], 2 * rewards[1]]
    assert made.take_statistics() is None


@pytest.mark.parametrize(("chosen", "right"), [(-3.0, 1.0), (-5.0, 0.0)])
def test_rewards_of_simpo_do_not_depend_on_lengths(chosen: float, right: float) -> None:
    made, of = preference("simpo"), sequences()
    values = sums(of)
    values[0, 0] = chosen
    made(values, of)
    taken = made.take_statistics()
    assert taken is not None
    assert taken.tolist() == [1, 1, right, 0.5 * chosen / CHOSEN_TOKENS, 0.5 * REJECTED / REJECTED_TOKENS]


@pytest.mark.parametrize(("chosen", "right"), [(CHOSEN, 1), (-9.0, 0)])
def test_a_pair_is_right_if_its_chosen_side_is_likelier(chosen: float, right: int) -> None:
    of = sequences()
    values = sums(of)
    values[0, 0] = chosen
    assert preference("simpo").compared(values, of)[1] == right


def answers(of: Sequences, of_scores: bool = False) -> tuple[Answers, Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(*shape, generator=seeded) for shape in ((11, 4), (1 if of_scores else 7, 4)))
    targets = torch.tensor([IGNORED, 2, 5, *[IGNORED] * 3, 1, 6, 0, 3, IGNORED])
    ends = last_tokens(of.starts).flatten() if of_scores else None
    made = Answers(targets, of.starts.flatten(), ends, of, lambda x: x, chunk_loss_and_gradient, 4, 0.0)
    return made, hidden, head


def by_definition(made: Answers, hidden: Tensor, head: Tensor) -> Tensor:
    if made.ends_N is not None:
        values = (hidden @ head[0]) * made.ends_N
    else:
        values = -F.cross_entropy(hidden @ head.T, made.targets_N, reduction="none", ignore_index=IGNORED)
    return torch.zeros_like(made.of.reference).scatter_add(1, made.starts_N[None], values[None])


@pytest.mark.parametrize("of_scores", [False, True])
def test_values_of_answers_stand_where_their_sequences_begin(of_scores: bool) -> None:
    made, hidden, head = answers(sequences(), of_scores)
    assert torch.allclose(answer_values(hidden, head, made), by_definition(made, hidden, head), atol=1e-6)


def test_scores_count_the_tokens_that_are_not_the_likeliest() -> None:
    made, hidden, head = answers(sequences())
    counting = made._replace(
        of_chunk=with_misses(chunk_loss_and_gradient, lambda logits, targets: logits.argmax(-1) == targets)
    )
    found = answer_scores(hidden, head, counting)
    missed = ((hidden @ head.T).argmax(-1) != made.targets_N) & (made.targets_N != IGNORED)
    assert torch.allclose(found[..., 0], by_definition(made, hidden, head), atol=1e-6)
    assert [found[0, 0, 1].item(), found[0, 4, 1].item()] == [missed[:4].sum().item(), missed[4:].sum().item()]


@pytest.mark.parametrize("objective", PREFERENCE_LOSSES)
def test_gradients_are_those_of_autograd(objective: str) -> None:
    made, hidden, head = answers(sequences(), objective == "reward")
    leaves = [hidden.requires_grad_(), head.requires_grad_()]
    loss = preference_loss(hidden, head, made, preference(objective))
    found = torch.autograd.grad(loss, leaves)
    other = preference(objective)(by_definition(made, hidden, head), made.of)
    assert loss.item() == pytest.approx(other.item(), rel=1e-5)
    for ours, theirs in zip(found, torch.autograd.grad(other, leaves), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_one_rank_alone_reports_the_loss() -> None:
    made, hidden, head = answers(sequences())
    silent = preference("dpo")
    silent.reports = False
    assert preference_loss(hidden, head, made, silent).item() == 0
    assert silent.take_statistics() is None


def test_the_last_tokens_of_sequences() -> None:
    assert last_tokens(torch.tensor([[0, 0, 2, 3, 3]])).tolist() == [[False, True, True, False, True]]
