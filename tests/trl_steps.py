"""Steps of TRL's trainers on a model of ours, which they read from a folder of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Trainer
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from argosy.models import hf
from argosy.models.decoder import Decoder
from transformers_models import load_theirs


class Recorded(Trainer):
    """Keeps the loss of each step, which the trainers' log rounds; takes examples that are tokens already."""

    def __init__(self, *args: Any, **keys: Any):
        self.losses: list[float] = []
        super().__init__(*args, **keys)

    def training_step(self, *args: Any, **keys: Any) -> torch.Tensor:
        loss = super().training_step(*args, **keys)
        self.losses.append(float(loss))
        return loss

    def _prepare_dataset(self, dataset: Dataset, *_: Any, **__: Any) -> Dataset:
        return dataset

    def tokenize_row(self, feature: dict[str, Any], *_: Any) -> dict[str, Any]:
        """Return what the trainers of SimPO and ORPO make of texts."""
        prompt, found = feature["tokens"]["prompt_ids"], {}
        for side in ("chosen", "rejected"):
            answer = feature["tokens"][f"{side}_ids"]
            words = {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
            found |= {f"{side}_{key}": value for key, value in words.items()}
            found[f"{side}_attention_mask"] = [1] * len(prompt + answer)
        return {**found, "prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}


TRAINERS: dict[str, tuple[type[Trainer], type, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {"dataset_kwargs": {"skip_prepare_dataset": True}}),
    "dpo": (DPOTrainer, DPOConfig, {}),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": ["ipo"]}),
    "simpo": (CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}),
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.1}),
    "kto": (KTOTrainer, KTOConfig, {}),
    "reward": (RewardTrainer, RewardConfig, {}),
}
"""Objective -> its trainer, with TRL's settings but for those that say what is computed."""
SETTINGS = {"undesirable_weight": "kto", "centring": "reward"}
THEIR_NAMES = {"centring": "center_rewards_coefficient"}


def steps_of_trl(
    objective: str,
    model: Decoder,
    examples: list[dict[str, Any]],
    *,
    steps: int,
    lr: float,
    eps: float,
    preference: Mapping[str, float],
) -> list[float]:
    """Return loss and gradient norm of each step; `examples`: tokens as the trainer's collator takes them."""
    trainer, config, more = TRAINERS[objective]
    more = more | {THEIR_NAMES.get(k, k): v for k, v in preference.items() if SETTINGS[k] == objective}
    if objective == "reward":  # its collator takes whole sequences
        examples = [
            {side: one["prompt_ids"] + one[side] for side in ("chosen_ids", "rejected_ids")} for one in examples
        ]
    if objective in {"simpo", "orpo"}:  # these take texts, and drop what is beside them when they have made tokens
        examples = [{"prompt": "", "chosen": "", "rejected": "", "tokens": one} for one in examples]
    with TemporaryDirectory() as folder:
        hf.export_folder(model.config, model.state_dict(), Path(folder, "model"), dtype=torch.float32)
        if objective == "reward":
            theirs = AutoModelForSequenceClassification.from_pretrained(Path(folder, "model"), dtype=torch.float32)
        else:
            theirs = load_theirs(Path(folder, "model"))
        theirs.config.pad_token_id = 0
        recorded = type("RecordedTrainer", (Recorded, trainer), {})(
            model=theirs,
            args=config(
                output_dir=folder, max_steps=steps, per_device_train_batch_size=len(examples) // steps,
                learning_rate=lr, lr_scheduler_type="constant", weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95,
                adam_epsilon=eps, max_grad_norm=1.0, train_sampling_strategy="sequential", logging_steps=1,
                save_strategy="no", report_to="none", use_cpu=True, bf16=False, activation_checkpointing=False,
                disable_tqdm=True, dataloader_pin_memory=False, **more,
            ),
            train_dataset=Dataset.from_list(examples),
            processing_class=tokenizer(),
        )  # fmt: skip
        recorded.train()
    norms = [entry["grad_norm"] for entry in recorded.state.log_history if "grad_norm" in entry]
    return [number for pair in zip(recorded.losses, norms, strict=True) for number in pair]


def tokenizer() -> PreTrainedTokenizerFast:
    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")
