"""Adapters of runs: merged into their weights, and in and out of PEFT's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.checkpoint import store
from argosy.checkpoint.adapter import adapter_shapes, check_folder, find_weights, open_base, open_weights
from argosy.checkpoint.load import opened
from argosy.checkpoint.weights import CheckpointWeights
from argosy.config.load import load
from argosy.config.train import LoraConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.model_folder import is_model_folder, refuse_existing
from argosy.data.tokenizer import usage_of
from argosy.errors import UserError
from argosy.inference.huggingface import cards_of, write_run
from argosy.inference.trained_model import TrainedModel, open_checkpoint, run_of_folder
from argosy.models import peft_adapter
from argosy.models.lazy_weights import HeldWeights


def merge_checkpoint(path: Path, out: Path, trust_code: bool = False) -> None:
    """Write the adapter of a run or checkpoint at `path`, merged into its weights, as the run folder `out`: tensor by
    tensor, in the weights' own dtypes. The folder gets the model card, as training ends there.

    Raises: UserError if there is no adapter, or `out` exists; StorageError if it cannot be written.
    """
    refuse_existing(out)
    found = _adapter_at(path, trust_code)
    model = found.run.model.model_copy(update={"weights": None})
    run = found.run.model_copy(update={"model": model, "lora": LoraConfig()})
    with open_weights(found.run, found.checkpoint) as weights:
        usage = usage_of(found.run_dir) | cards_of(found, "safetensors")
        write_run(run, weights, out, _tokenizer(found.run_dir), usage)


def export_adapter(
    path: Path, out: Path, trust_code: bool = False, license_name: str = "", overwrite: bool = False
) -> None:
    """Write the adapter of a run or checkpoint at `path` as PEFT's folder `out`, with a model card (`cards_of`).

    Raises: UserError if there is no adapter, or `out` exists; StorageError if it cannot be written.
    """
    found = _adapter_at(path, trust_code)
    run, cards = found.run, cards_of(found, "peft", license_name, overwrite)
    with open_base(run, found.checkpoint) as weights, opened(found.checkpoint) as held:
        adapter = CheckpointWeights(found.checkpoint, held, adapter_shapes(run))
        peft_adapter.export_adapter(run.model, run.lora, adapter, weights, out, str(run.model.weights or ""), cards)


def import_adapter(folder: Path, base: Path, out: Path) -> None:
    """Turn PEFT's `folder`, an adapter of the weights in `base`, a run, a checkpoint or a Hugging Face folder, into the
    run folder `out`.

    Raises: UserError if it is not an adapter of these weights, or `out` exists; StorageError if it cannot be written.
    """
    refuse_existing(out)
    if is_model_folder(base):
        run, weights, tokenizer = run_of_folder(base)
        lora, tensors = peft_adapter.import_adapter(folder, run.model, weights)
        beside, sha256, usage = base.absolute(), check_folder(base), usage_of(base)
    else:
        whole, found = open_checkpoint(base), find_weights(base)
        run = whole.run
        with open_weights(run, found) as weights:
            lora, tensors = peft_adapter.import_adapter(folder, run.model, weights)
        beside, sha256, usage = found.folder.absolute(), found.manifest.sha256, usage_of(whole.run_dir)
        tokenizer = _tokenizer(whole.run_dir)
    model = run.model.model_copy(update={"weights": beside})
    run = run.model_copy(update={"model": model, "lora": lora})
    write_run(run, HeldWeights(tensors), out, tokenizer, usage, sha256)


@dataclass(frozen=True)
class AdapterFacts:
    """A run that trains an adapter, as a list shows it."""

    run_dir: Path
    lora: LoraConfig
    weights: Path | None
    step: int | None
    """Step of its newest checkpoint; None before the first."""
    bytes: int

    def to_record(self) -> dict[str, Any]:
        """Return all of it, as JSON has it."""
        settings = self.lora.model_dump(mode="json")
        weights = None if self.weights is None else str(self.weights)
        return {"run": str(self.run_dir), "weights": weights, "step": self.step, "bytes": self.bytes, **settings}


def adapters_in(folder: Path) -> list[AdapterFacts]:
    """Return the runs in a folder of runs that train adapters, by name. Raises: UserError for a wrong run file."""
    found = []
    for file in sorted(folder.glob("*/run.toml")):
        run = load(file)
        if run.lora.rank:
            newest = next(reversed(store.committed(file.parent)), None)
            step, size = (None, 0) if newest is None else (newest.step, newest.bytes)
            found.append(AdapterFacts(file.parent, run.lora, run.model.weights, step, size))
    return found


def _adapter_at(path: Path, trust_code: bool) -> TrainedModel:
    found = open_checkpoint(path, trust_code)
    if not found.run.lora.rank:
        raise UserError(f"{path}: the run has no adapter (lora.rank = 0): its weights are whole already.")
    return found


def _tokenizer(run_dir: Path) -> bytes | None:
    file = run_dir / TOKENIZER
    return file.read_bytes() if file.is_file() else None
