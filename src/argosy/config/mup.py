"""The run file's table `model.mup`: learning rates that hold for every width."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeInt, model_validator

from argosy.config.section import Section


class MuPConfig(Section):
    """Maximal update parametrization (Yang & Hu 2021, Tensor Programs V): the learning rate that is best for a narrow
    model is best for wide ones too. A size of the base model that is 0 follows from this model's."""

    base_width: NonNegativeInt = 0
    """Width of the narrow model for which optimizer.lr and init_std hold as they are; 0: the usual parametrization."""
    base_head_width: NonNegativeInt = 0
    """Width of its heads; 0: that of this model, so that wider models have more heads."""
    base_ffn_width: NonNegativeInt = 0
    """Its ffn_width; 0: in proportion to the width."""
    base_expert_ffn_width: NonNegativeInt = 0
    """Its moe.expert_ffn_width; 0: in proportion to the width."""
    base_kv_rank: NonNegativeInt = 0
    """Its mla.kv_rank; 0: in proportion to the width."""
    base_q_rank: NonNegativeInt = 0
    """Its mla.q_rank; 0: in proportion to the width."""

    @model_validator(mode="after")
    def _has_a_width(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if given and not self.base_width:
            raise ValueError(f"{given[0]} = {getattr(self, given[0])} has no effect without base_width; give it too")
        return self
