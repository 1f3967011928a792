"""Losses of preferences: functions of the log-probability of whole answers, or of their score, and their gradients by
token.

Rows hold sequences: the two sides of a pair, one after the other, or an answer that was judged. The log-probability of
an answer is the sum over its tokens. A loss is computed from these sums; its derivative by one of them is what the
tokens of that answer weigh in the gradient. So the head is passed twice, and no logits are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from argosy.config.train import PreferenceConfig
from argosy.data.packing import CHOSEN_SIDE, REJECTED_SIDE
from argosy.models.loss import ChunkLoss, gradients_times, token_losses, weighted_gradients

# B rows, T tokens of a row, N tokens that a rank has (of B rows, its part of each), D model width, V vocabulary


class Sequences(NamedTuple):
    """The sequences in whole rows. Each tensor is [B, T]; but for `starts` it says something where one begins."""

    starts: Tensor
    """Start of the sequence of each token; int64."""
    kinds: Tensor
    """As `data.packing.RowSequences` has them; int64."""
    partners: Tensor
    """Start of the rejected side of a pair, at its chosen one; int64."""
    lengths: Tensor
    """Tokens of the answer; fp32."""
    reference: Tensor
    """Log-probability of the answer before training; fp32. 0 if the objective has no use for it."""


class Preference:
    """An objective over answers. One instance serves all parts of the model on a rank."""

    def __init__(self, objective: str, config: PreferenceConfig):
        self._loss = PREFERENCE_LOSSES[objective]
        self.objective, self.config = objective, config
        self.reports = True
        """False on all of those ranks but one: each of them computes the whole loss."""
        self.per_token: Tensor | float = 0.0
        """ORPO: answers of the global batch over their tokens, as the loss is divided by the number of answers."""
        self.kl: Tensor | float = 0.0
        """KTO: the estimate of the KL divergence from the global batch."""
        self._statistics: list[Tensor] = []

    @property
    def compares_pairs(self) -> bool:
        """False if each answer is judged by itself."""
        return self.objective != "kto"

    def __call__(self, sums_BT: Tensor, of: Sequences) -> Tensor:
        """Return the loss, summed over pairs or judged answers, of log-probabilities of answers, fp32 [B, T]."""
        values_BT = _means(sums_BT, of) if self.objective in OF_MEANS else sums_BT - of.reference
        rewards_BT = self.config.beta_of(self.objective) * values_BT
        losses = self._loss(self, sums_BT, of)
        self._statistics.append(_statistics(rewards_BT.detach(), of))
        return losses

    def compared(self, sums_BT: Tensor, of: Sequences) -> Tensor:
        """Return the summed loss of pairs, and the number whose chosen side has the higher value: fp64 [2]."""
        chosen, rejected = _pairs(sums_BT, of)
        return torch.stack([self._loss(self, sums_BT, of), (chosen > rejected).sum()]).double()

    def take_statistics(self) -> Tensor | None:
        """Return what `STATISTICS` names, fp64, summed over what was computed since the last call; None of nothing."""
        taken, self._statistics = self._statistics, []
        return torch.stack(taken).sum(0) if taken and self.reports else None


STATISTICS = ("chosen", "rejected", "right", "chosen_reward", "rejected_reward")
"""Numbers of chosen and rejected answers, of pairs whose chosen side has the higher reward, and sums of rewards."""


def _statistics(rewards_BT: Tensor, of: Sequences) -> Tensor:
    chosen_BT, rejected_BT = of.kinds == CHOSEN_SIDE, of.kinds == REJECTED_SIDE
    right_BT = chosen_BT & (rewards_BT > rewards_BT.gather(1, of.partners))
    counts = [chosen_BT.sum(), rejected_BT.sum(), right_BT.sum()]
    return torch.stack([*counts, (rewards_BT * chosen_BT).sum(), (rewards_BT * rejected_BT).sum()]).double()


def _pairs(values_BT: Tensor, of: Sequences) -> tuple[Tensor, Tensor]:
    """Return the values of both sides of all pairs, [pairs] each."""
    chosen_BT = of.kinds == CHOSEN_SIDE
    return values_BT[chosen_BT], values_BT.gather(1, of.partners)[chosen_BT]


def _means(sums_BT: Tensor, of: Sequences) -> Tensor:
    return sums_BT / of.lengths.clamp(min=1.0)


def dpo(preference: Preference, sums_BT: Tensor, of: Sequences) -> Tensor:
    """-log sigmoid(beta (chosen - rejected)), of log-ratios to the reference (Rafailov et al. 2023, equation 7).

    With label_smoothing e, labels are wrong with that probability (Mitchell 2023, "cDPO").
    """
    chosen, rejected = _pairs(sums_BT - of.reference, of)
    logits, smoothing = preference.config.beta_of("dpo") * (chosen - rejected), preference.config.label_smoothing
    return (-(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)).sum()


def ipo(preference: Preference, sums_BT: Tensor, of: Sequences) -> Tensor:
    """(chosen - rejected - 1 / (2 beta))^2, of log-ratios to the reference (Azar et al. 2023, equation 17).

    The log-ratios are means over tokens, as the authors do and TRL took over.
    """
    chosen, rejected = _pairs(_means(sums_BT - of.reference, of), of)
    return (chosen - rejected - 1 / (2 * preference.config.beta_of("ipo"))).square().sum()


def simpo(preference: Preference, sums_BT: Tensor, of: Sequences) -> Tensor:
    """-log sigmoid(beta (chosen - rejected) - margin), of mean log-probabilities (Meng et al. 2024, equation 6)."""
    chosen, rejected = _pairs(_means(sums_BT, of), of)
    return -F.logsigmoid(preference.config.beta_of("simpo") * (chosen - rejected) - preference.config.margin).sum()


def orpo(preference: Preference, sums_BT: Tensor, of: Sequences) -> Tensor:
    """The chosen answer's negative log-likelihood, - beta log sigmoid(log odds ratio) (Hong et al. 2024, equation 6).

    The odds are those of mean log-probabilities. The likelihood is a mean over the tokens of the global batch.
    """
    chosen, rejected = _pairs(_means(sums_BT, of), of)
    log_odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    likelihood = sums_BT[of.kinds == CHOSEN_SIDE].sum() * preference.per_token
    return -likelihood - preference.config.beta_of("orpo") * F.logsigmoid(log_odds).sum()


def kto(preference: Preference, sums_BT: Tensor, of: Sequences) -> Tensor:
    """1 - sigmoid(beta (r - KL)) of desirable, 1 - sigmoid(beta (KL - r)) of other answers, each times its weight.

    r: the log-ratio to the reference (Ethayarajh et al. 2024, equation 8).
    """
    ratios_BT, beta, config = sums_BT - of.reference, preference.config.beta_of("kto"), preference.config
    desirable, undesirable = ratios_BT[of.kinds == CHOSEN_SIDE], ratios_BT[of.kinds == REJECTED_SIDE]
    kl = preference.kl
    good = (1 - torch.sigmoid(beta * (desirable - kl))).sum() * config.desirable_weight
    return good + (1 - torch.sigmoid(beta * (kl - undesirable))).sum() * config.undesirable_weight


def reward(preference: Preference, scores_BT: Tensor, of: Sequences) -> Tensor:
    """-log sigmoid(chosen - rejected), of the scores of whole conversations (Ouyang et al. 2022, equation 1; the model
    of Bradley & Terry 1952), and `centring` (chosen + rejected)^2 (Eisenstein et al. 2023)."""
    chosen, rejected = _pairs(scores_BT, of)
    centred = preference.config.centring * (chosen + rejected).square().sum()
    return -F.logsigmoid(chosen - rejected).sum() + centred


PREFERENCE_LOSSES: dict[str, Callable[[Preference, Tensor, Sequences], Tensor]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
    "reward": reward,
}
WITH_REFERENCE = ("dpo", "ipo", "kto")
"""Objectives that compare with the model as it was before training."""
OF_MEANS = ("simpo", "orpo")
"""Objectives by which a reward is of the mean over an answer's tokens, whatever its length."""


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-6)))


class Answers(NamedTuple):
    """The rest of what the values of answers are computed from: not hidden states, nor the head's weight."""

    targets_N: Tensor
    starts_N: Tensor
    """The place where the sequence of each of this rank's tokens begins."""
    ends_N: Tensor | None
    """True for the last tokens of sequences, at which a reward model gives its score; None of logits."""
    of: Sequences
    sum_over_tokens: Callable[[Tensor], Tensor]
    of_chunk: ChunkLoss
    rows: int
    softcap: float


def answer_scores(x_ND: Tensor, weight_VD: Tensor, answers: Answers) -> Tensor:
    """Return the log-probability of each answer, and how many of its tokens are not the likeliest, where its sequence
    begins; fp32 [B, T, 2]. answers: its `of_chunk` as `with_misses` makes it."""
    scores_N2 = token_losses(x_ND, weight_VD, answers.targets_N, answers.of_chunk, answers.rows, answers.softcap)
    sums_BT2 = torch.zeros_like(answers.of.reference)[..., None].repeat(1, 1, 2)
    starts_BT, scores_BT2 = answers.starts_N.view(len(sums_BT2), -1), scores_N2.view(len(sums_BT2), -1, 2)
    sums_BT2.scatter_add_(1, starts_BT[..., None].expand_as(scores_BT2), scores_BT2)
    return answers.sum_over_tokens(sums_BT2) * sums_BT2.new_tensor([-1.0, 1.0])


def answer_values(x_ND: Tensor, weight_VD: Tensor, answers: Answers) -> Tensor:
    """Return the log-probability of each answer, or its score, where its sequence begins; fp32 [B, T], no gradients."""
    if answers.ends_N is not None:
        values_N = (x_ND.float() @ weight_VD[0].float()) * answers.ends_N
    else:
        values_N = -token_losses(x_ND, weight_VD, answers.targets_N, answers.of_chunk, answers.rows, answers.softcap)
    sums_BT = torch.zeros_like(answers.of.reference)
    sums_BT.scatter_add_(1, answers.starts_N.view(len(sums_BT), -1), values_N.view(len(sums_BT), -1))
    return answers.sum_over_tokens(sums_BT)


def preference_loss(x_ND: Tensor, weight_VD: Tensor, answers: Answers, preference: Preference) -> Tensor:
    """Return the loss summed over answers, fp32 scalar."""
    loss: Tensor = _PreferenceLoss.apply(x_ND, weight_VD, answers, preference)
    return loss


class _PreferenceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, answers: Answers, preference: Preference) -> Tensor:
        sums_BT = answer_values(x_ND, weight_VD, answers)
        with torch.enable_grad():
            sums_BT.requires_grad_()
            loss = preference(sums_BT, answers.of)
            (slopes_BT,) = torch.autograd.grad(loss, sums_BT)
        slopes_N = slopes_BT.gather(1, answers.starts_N.view(len(sums_BT), -1)).flatten()
        if answers.ends_N is not None:
            slopes_1N = (slopes_N * answers.ends_N)[None]
            gradients = (
                (slopes_1N.T @ weight_VD.float()).to(x_ND.dtype),
                (slopes_1N @ x_ND.float()).to(weight_VD.dtype),
            )
            ctx.save_for_backward(
                *(g if need else None for g, need in zip(gradients, ctx.needs_input_grad, strict=False))
            )
        else:
            about = (answers.targets_N, -slopes_N, answers.of_chunk, answers.rows, answers.softcap)
            ctx.save_for_backward(*weighted_gradients(ctx.needs_input_grad[:2], x_ND, weight_VD, *about)[1:])
        return loss.detach() if preference.reports else torch.zeros_like(loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients_times(ctx.saved_tensors, grad_loss), None, None


def last_tokens(starts_BT: Tensor) -> Tensor:
    """Return True for the last token of each sequence in whole rows."""
    following_BT = F.pad(starts_BT[:, 1:], (0, 1), value=-1)
    return following_BT != starts_BT
