"""Metrics of preferences: how well the model tells the preferred answers of each step from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from argosy.models.preference import STATISTICS
from argosy.parallel.model import ParallelModel
from argosy.training.parts import Parts
from argosy.training.services.service import Service
from argosy.training.step import StepOutcome


class Preferences(Service):
    """Sums rewards over ranks: beta times the log-probability of an answer, or its ratio to the reference."""

    @classmethod
    def of(cls, parts: Parts) -> Preferences:
        return cls(parts.state.model)

    def __init__(self, model: ParallelModel):
        self._model = model
        self._line: dict[str, Any] = {}

    def measure(self) -> Sequence[float] | Tensor:
        """Return this rank's share of the sums that `STATISTICS` names; nothing if no preferences are learned."""
        preferences = self._model.preferences
        if not preferences:
            return ()
        found = [preference.take_statistics() for preference in preferences]
        taken = [statistics for statistics in found if statistics is not None]
        is_first = self._model.meshes.rank("tp") == 0  # all ranks of a tp group have the same
        nothing = torch.zeros(len(STATISTICS), dtype=torch.float64, device=self._model.device)
        return torch.stack(taken).sum(0) if taken and is_first else nothing

    def after_exchange(self, outcome: StepOutcome, sums: Sequence[float]) -> None:
        if not sums:
            return
        of = dict(zip(STATISTICS, sums, strict=True))
        chosen, rejected = max(of["chosen"], 1.0), max(of["rejected"], 1.0)
        self._line = {
            "chosen_reward": of["chosen_reward"] / chosen,
            "rejected_reward": of["rejected_reward"] / rejected,
        }
        if self._model.preferences[0].compares_pairs:
            self._line["reward_accuracy"] = of["right"] / chosen

    def line(self, step: int) -> Mapping[str, Any]:
        return self._line
