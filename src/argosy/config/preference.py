"""The run file's table `preference`: what the objectives that learn from preferences can be set to."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat

from argosy.config.section import Section

BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1, "kto": 0.1}
"""The published beta of each objective: Rafailov et al. 2023 (section 6), TRL's of IPO, Meng et al. 2024 (section 4),
Hong et al. 2024 (its lambda, section 6.1), Ethayarajh et al. 2024 (section 4.3)."""


class PreferenceConfig(Section):
    """Strength with which preferences are followed (docs/fine-tuning.md)."""

    beta: NonNegativeFloat = 0.0
    """dpo, ipo, kto: how much it costs to leave the reference; simpo: scale of the reward; orpo: weight of the odds
    ratio. 0: 0.1, of simpo 2."""
    margin: NonNegativeFloat = 1.0
    """simpo: by how much the chosen side's reward should be higher (half of beta: Meng et al. 2024)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """dpo: share of pairs whose sides are thought to be swapped."""
    desirable_weight: NonNegativeFloat = 1.0
    """kto: weight of desirable answers."""
    centring: NonNegativeFloat = 0.0
    """reward: weight of the squared sum of a pair's scores, which keeps their mean near 0 (Eisenstein et al. 2023, and
    TRL's center_rewards_coefficient, with 0.01)."""
    undesirable_weight: NonNegativeFloat = 1.0
    """kto: weight of undesirable answers; with many more of one kind, raise the weight of the other."""

    def beta_of(self, objective: str) -> float:
        """Return beta, or the published one; of a score, which is no log-probability, it is 1."""
        return 1.0 if objective == "reward" else self.beta or BETAS[objective]
