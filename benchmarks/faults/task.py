"""What every contender of the fault benchmark trains, and how it tells how far it is.

The same decoder (Argosy's, eager), the same rows of the same prepared text in the same order, AdamW at a constant rate.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from argosy.config.load import load
from argosy.data.loader import open_data
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.microbatch import microbatches


class Task:
    """A run file of Argosy, as a plain script needs it: this rank's part."""

    def __init__(self, run_file: Path, rank: int, size: int):
        self.run = load(run_file)
        self.rows = self.run.train.global_batch // size
        self.data = open_data(self.run.data, self.run.seed, self.run.train.global_batch)
        self.loader = self.data.loader(slice(rank * self.rows, (rank + 1) * self.rows))
        torch.manual_seed(self.run.seed)
        torch.set_num_threads(1)

    def model(self) -> Decoder:
        """With the initial weights that Argosy gives it."""
        config = self.run.model.model_copy(update={"vocab_size": self.run.model.vocab_size or self.data.vocab_size})
        model = Decoder(config)
        materialize(model, config, torch.device("cpu"), self.run.seed)
        return model

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
        o = self.run.optimizer
        return torch.optim.AdamW(parameters, lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=o.weight_decay)

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        """The mean loss over this rank's rows of the step."""
        (micro,) = microbatches(self.loader.read(step), self.rows, self.data.eod_id, torch.device("cpu"))
        return model(micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents) / micro.targets_BT.numel()

    @property
    def steps(self) -> int:
        return self.run.train.steps

    @property
    def save_every(self) -> int:
        return self.run.checkpoint.every_steps


def tell(folder: Path, step: int, loss: float) -> None:
    """One line: that `step` was made."""
    line = json.dumps({"step": step, "loss": loss, "time_s": time.time(), "pid": os.getpid()})
    with (folder / "progress.jsonl").open("a") as file:
        file.write(line + "\n")
