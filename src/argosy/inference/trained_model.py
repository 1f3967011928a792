"""A trained model ready for use: weights, sizes and tokenizer from a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from argosy.checkpoint import store
from argosy.checkpoint.load import load_into, problem_of
from argosy.checkpoint.shards import wholes
from argosy.checkpoint.store import Checkpoint
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.tokenizer import Tokenizer
from argosy.errors import UserError
from argosy.extend.trust import approve
from argosy.models.decoder import Decoder
from argosy.models.own_family import load_family


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint, with its run file and tokenizer."""

    checkpoint: Checkpoint
    run: RunConfig
    run_dir: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with. Raises: UserError if the run folder has none."""
        path = self.run_dir / TOKENIZER
        if not path.is_file():
            raise UserError(f"{path}: no tokenizer there. Copy the model's tokenizer.json to it.")
        return Tokenizer.load(path)

    def model(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
        """Return the model with the checkpoint's fp32 weights, computing in `dtype` on `device` (default: a GPU).

        Raises: UserError if the checkpoint lacks one of them, or the model needs code that is not approved.
        """
        load_family(self.run)
        model = Decoder(self.run.model, dtype)
        model.to_empty(device=device or default_device())
        load_into(wholes(model.state_dict(), "model."), self.checkpoint, may_lack=False)
        return model.eval()


def open_checkpoint(path: Path, trust_code: bool = False) -> TrainedModel:
    """Open what a user names: a run folder (its newest whole checkpoint) or one checkpoint.

    trust_code: approve the code that the run brings along. Otherwise a model that needs code which this user has not
    approved is refused when it is made. Raises: UserError.
    """
    checkpoint = store.find(path, problem_of)
    run_dir = checkpoint.folder.parent.parent
    run = load(run_dir / "run.toml")
    if trust_code:
        approve(run.extend.code)
    return TrainedModel(checkpoint, run, run_dir)


def default_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
