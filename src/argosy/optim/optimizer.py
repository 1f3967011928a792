"""The optimizer of a run, one of the table or the user's: it steps each piece with the rule, learning rate and weight
decay that the run file gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from argosy.config.optimizer import OptimizerConfig, ParameterSettings, RateFactor, no_factor, settings_of
from argosy.config.schema import RunConfig
from argosy.faults import fault
from argosy.optim.piece import Piece, Slot
from argosy.optim.rules import AdamW, Lion, Muon, UpdateRule, user_rule
from argosy.plan.mup import rate_factor

RULES: dict[str, type[UpdateRule]] = {"adamw": AdamW, "lion": Lion, "muon": Muon}


class Optimizer:
    """Updates pieces of parameters. Results depend neither on how parameters are cut nor on the order of the pieces.

    `seed` is for random rounding, which is used where weights are bf16 or state is int8.

    Raises: ValueError if a piece is neither fp32 nor bf16.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        config: OptimizerConfig,
        seed: int = 0,
        own: Callable[[OptimizerConfig], UpdateRule] | None = None,
        rate_factor: RateFactor = no_factor,
    ):
        """`own` makes the rule that `config.kind` names, if it is the user's. `rate_factor`: see `settings_of`."""
        self._lr = config.lr
        self._rules = {name: rule(config) for name, rule in RULES.items()} | ({config.kind: own(config)} if own else {})
        self._slots: dict[str, Slot] = {}
        for piece in pieces:
            if piece.value.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{piece.name} is {piece.value.dtype}; an optimizer updates fp32 or bf16")
            settings = settings_of(piece.name, piece.shape, config, rate_factor)
            self._slots[piece.name] = Slot(piece, settings, seed, self._rules[settings.rule].moments)
        assert len(self._slots) == len(pieces), "two pieces of one name"
        self._is_prepared = False
        self._groups: dict[ParameterSettings, list[Slot]] = {}
        for slot in self._slots.values():
            self._groups.setdefault(slot.settings, []).append(slot)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that it updates, in the given order."""
        return [slot.piece for slot in self._slots.values()]

    @property
    def state_bytes(self) -> int:
        """Memory that the state takes on this rank, bytes."""
        return sum(slot.nbytes for slot in self._slots.values())

    @property
    def is_local(self) -> bool:
        """True if `prepare` needs no other rank."""
        slots = self._slots.values()
        return all(self._rules[slot.settings.rule].is_local or slot.piece.group is None for slot in slots)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next steps, before each group's factor."""
        self._lr = lr

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute from the gradients all that `step` needs of other ranks. The state does not change.

        Ranks that share parameters call it together. Raises: ValueError if a gradient is missing.
        """
        for settings, slots in self._groups.items():
            self._rules[settings.rule].prepare(slots)
        self._is_prepared = True

    @torch.no_grad()
    def step(self, watch: Callable[[Piece, Tensor], None] | None = None) -> None:
        """Apply the gradients. After `prepare` this needs no other rank. Raises: ValueError if one is missing.

        watch: is called after each piece's update, with the piece and a copy of its value before. The numbers are the
            same with it and without; one piece after the other takes longer.
        """
        if not self._is_prepared:
            self.prepare()
        self._is_prepared = False
        for settings, slots in self._groups.items():
            rule, lr = self._rules[settings.rule], self._lr * settings.lr_factor
            for some in [slots] if watch is None else [[slot] for slot in slots]:
                before = None if watch is None else some[0].piece.value.clone()
                rule.step(some, lr, settings.weight_decay)
                if watch is not None and before is not None:
                    watch(some[0].piece, before)
            for slot in slots:
                if not slot.piece.value.numel():  # no rule opened it, and this rank may be the one that saves the count
                    slot.steps += 1
            fault("optimizer")

    def zero_grad(self) -> None:
        """Release the gradients."""
        for slot in self._slots.values():
            slot.piece.value.grad = None

    def state_of(self, piece: Piece) -> dict[str, Tensor]:
        """Return a piece's state for a checkpoint: moments (fp32, local shape; zeros before the first step) and `step`.

        Moments may be the live tensors: copy them if they must not change. Values read into them take effect only when
        `load_state` is called with them.
        """
        slot = self._slots[piece.name]
        steps = torch.full((), float(slot.steps), device=piece.value.device)
        with torch.no_grad():
            return {"step": steps, **slot.moments()}

    def kept_of(self, piece: Piece) -> dict[str, Tensor]:
        """Return the live tensors that hold the piece's moments, in their own format; none before the first step."""
        return self._slots[piece.name].kept()

    @torch.no_grad()
    def load_state(self, piece: Piece, state: dict[str, Tensor]) -> None:
        """Restore what `state_of` returned. Raises: KeyError, ValueError if it belongs to another rule or shape."""
        slot = self._slots[piece.name]
        slot.load(state)
        slot.steps = int(state["step"])


def optimizer_of(run: RunConfig, pieces: Sequence[Piece]) -> Optimizer:
    """Return the optimizer of these pieces, before its first step. Raises: UserError for a rule that does not exist."""
    own = user_rule(run.extend.code, run.optimizer.kind) if run.optimizer.kind not in RULES else None
    return Optimizer(pieces, run.optimizer, run.seed, own, partial(rate_factor, model=run.model))
