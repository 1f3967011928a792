"""Checkpoints of adapters: they hold what was trained, and name the weights beside it by the checksum of the checkpoint
that these came from. Both together are a model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from argosy.checkpoint import store
from argosy.checkpoint.checksums import step_of
from argosy.checkpoint.load import load_into, problem_of
from argosy.checkpoint.shards import wholes
from argosy.checkpoint.store import Checkpoint
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.models.adapters import PARTS, merged
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.own_family import load_family
from argosy.plan.parameters import adapter_of, run_table


def find_weights(path: Path, sha256: str = "", check: Callable[[Checkpoint], str | None] = problem_of) -> Checkpoint:
    """Return the checkpoint with the weights that a run starts from: the one at `path`, a run folder or checkpoint; if
    `sha256` is given, that with this manifest, there or beside it.

    Raises: UserError if it is not there, is damaged, or holds an adapter alone.
    """
    found = None
    if sha256:
        run_dir = path.parent.parent if step_of(path.name) is not None else path
        known = [c for c in store.committed(run_dir) if c.manifest.sha256 == sha256]
        if not known:
            raise UserError(
                f"model.weights = {path}: the adapter was trained beside other weights (manifest sha256 "
                f"{sha256[:12]}...), and no checkpoint there is these. Name the run folder that has them in "
                "model.weights."
            )
        found = known[0]
        if problem := check(found):
            raise UserError(f"{problem}. The adapter needs it: restore it from a copy.")
    found = found or store.find(path, check)
    if found.manifest.base_sha256:
        raise UserError(
            f"model.weights = {path}: {found.folder} holds an adapter alone, not whole weights. Merge it with its own "
            f"first: argosy checkpoint merge {path} --out FOLDER."
        )
    return found


def load_model(run: RunConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the whole model of a checkpoint, with fp32 weights, computing in `dtype`; an adapter is merged into them.

    Raises: UserError if the checkpoint lacks a tensor, an adapter's own weights are not there, or the model needs code
    that is not approved.
    """
    load_family(run)
    model = Decoder(run.model, dtype)
    if not run.lora.rank:
        model.to_empty(device=device)
        load_into(wholes(model.state_dict(), "model."), checkpoint, may_lack=False)
        return model
    if run.model.weights is None:  # the adapter stands beside the initial weights
        materialize(model, run.model, device, run.seed)
    else:
        model.to_empty(device=device)
        base = find_weights(run.model.weights, checkpoint.manifest.base_sha256)
        load_into(wholes(model.state_dict(), "model."), base, may_lack=False)
    merge_adapter(model, run, checkpoint)
    return model


@torch.no_grad()
def merge_adapter(model: Decoder, run: RunConfig, checkpoint: Checkpoint) -> None:
    """Merge the adapter of a checkpoint into the weights of `model`, in place. Raises: UserError if it does not fit."""
    table = run_table(run)
    for name, weight in model.named_parameters():
        adapter = adapter_of(name)
        parts = {part: table[f"{adapter}.{part}"].shape for part in PARTS if f"{adapter}.{part}" in table}
        if parts:
            tensors = {part: torch.empty(shape, device=weight.device) for part, shape in parts.items()}
            named = {f"{adapter}.{part}": tensor for part, tensor in tensors.items()}
            load_into(wholes(named, "model."), checkpoint, may_lack=False)
            weight.copy_(merged(weight, tensors["a"], tensors["b"], tensors.get("magnitude"), run.lora.scale))
