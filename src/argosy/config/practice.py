"""Values that a run has unless it says others, by objective and adapter, from published practice; and which of a run
preset's values say nothing of a run that is given something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from argosy.config.data import row_kind
from argosy.config.layers import WEIGHTS, Layer
from argosy.config.section import Key, key_of

OBJECTIVE, LORA_RANK = key_of("train.objective"), key_of("lora.rank")

ROW_TOKENS = 1024
"""Longest row of conversations, as TRL's trainers have it (max_length); a model with a shorter context has shorter
rows."""


class Practice(NamedTuple):
    """The usual settings of an objective."""

    lr: float
    """With all weights trained."""
    warmup: float
    """Share of the steps."""
    epochs: float


OF_OBJECTIVE: Mapping[str, Practice] = {
    "sft": Practice(2e-5, 0.03, 3),
    "dpo": Practice(5e-7, 0.1, 1),
    "ipo": Practice(5e-7, 0.1, 1),
    "simpo": Practice(8e-7, 0.1, 1),
    "orpo": Practice(8e-6, 0.1, 1),
    "kto": Practice(5e-7, 0.1, 1),
    "reward": Practice(1e-5, 0.03, 1),
}
"""sft: Taori et al. 2023 (Alpaca), whose rate is that of Tunstall et al. 2023 (Zephyr) too. dpo: Tunstall et al. 2023
and Lambert et al. 2024 (Tulu 3); ipo as dpo. simpo: Meng et al. 2024, whose rates are 3e-7 to 1e-6. orpo: Hong et al.
2024. kto: TRL's script. reward: Touvron et al. 2023 (Llama 2). All decay by a cosine or linearly to about nothing, with
Adam's usual beta2 and no weight decay."""
TUNED: Mapping[Key, object] = {
    key_of("optimizer.beta2"): 0.999,
    key_of("optimizer.weight_decay"): 0.0,
}
ADAPTER_LR = 2e-4
"""Hu et al. 2021 (appendix D, GPT-3) and Dettmers et al. 2023 ("QLoRA", table 9), who also give beta2 and no weight
decay: of text and of conversations."""
ADAPTER_FACTOR = 10
"""The best rate of an adapter over that of all weights, whatever the rank (Schulman et al. 2025, "LoRA Without
Regret")."""

STANDS_FOR: Mapping[Key, tuple[Key, ...]] = {
    key_of("train.epochs"): (key_of("train.steps"), key_of("train.minutes")),
    key_of("schedule.warmup_fraction"): (key_of("schedule.warmup_steps"), key_of("train.minutes")),
}
"""Key -> those that say the same in another way, or cannot go with it: practice leaves it out beside one of these."""

SAYS_NOTHING: Mapping[Key, tuple[str, ...]] = {
    WEIGHTS: ("model",),
    LORA_RANK: ("optimizer",),
    OBJECTIVE: (
        *("name", "data.seq_len", "data.prepare.out", "data.prepare.vocab_size", "data.prepare.max_text_bytes"),
        *("train", "optimizer", "schedule", "evaluate", "launch.processes"),
    ),
}
"""A key that a run is given -> the keys and tables of a run preset that are nobody's choice then: they are of its own
model, of training all weights, or of its text."""


def of_preset(preset: Layer, given: Layer) -> Layer:
    """Return the values of a run preset that still say something beside those that are `given`."""
    prefixes = [key_of(name) for key, names in SAYS_NOTHING.items() if _is_asked(given, key) for name in names]
    return {key: entry for key, entry in preset.items() if not any(key[: len(prefix)] == prefix for prefix in prefixes)}


def practice(asked: Layer, longest: object) -> dict[Key, object]:
    """Return the values that a run has which says nothing of them.

    asked: what it says. longest: the model's longest sequence in tokens, if it is known.
    """
    objective, has_adapter = _value(asked, OBJECTIVE), bool(_value(asked, LORA_RANK))
    usual = OF_OBJECTIVE.get(objective) if isinstance(objective, str) else None
    found: dict[Key, object] = dict(TUNED) if usual or has_adapter else {}
    if has_adapter:
        found[key_of("optimizer.lr")] = ADAPTER_LR if usual is None else usual.lr * ADAPTER_FACTOR
    if usual is None:
        return found
    found |= {
        key_of("name"): objective,
        key_of("data.seq_len"): min(ROW_TOKENS, longest) if isinstance(longest, int) else ROW_TOKENS,
        key_of("data.prepare.out"): f"data/{row_kind(str(objective))}",
        key_of("train.epochs"): usual.epochs,
        key_of("schedule.kind"): "cosine",
        key_of("schedule.warmup_fraction"): usual.warmup,
        key_of("schedule.final_ratio"): 0.0,
    }
    if objective == "reward":
        found[key_of("model.score")] = True
    if not has_adapter:
        found[key_of("optimizer.lr")] = usual.lr
    others = {key: [other for other in rest if _value(asked, other)] for key, rest in STANDS_FOR.items()}
    return {key: value for key, value in found.items() if not others.get(key)}


def _value(layer: Layer, key: Key) -> object:
    return layer[key].value if key in layer else None


def _is_asked(given: Layer, key: Key) -> bool:
    return _value(given, key) not in (None, 0, "pretrain")
