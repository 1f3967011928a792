"""Checkpoints of adapters: they hold what was trained, and name the weights beside it by the checksum of the checkpoint
that these came from. Both together are a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from argosy.checkpoint import store
from argosy.checkpoint.checksums import step_of
from argosy.checkpoint.load import opened, problem_of
from argosy.checkpoint.shards import wholes
from argosy.checkpoint.store import Checkpoint
from argosy.checkpoint.weights import MODEL_PREFIX, CheckpointWeights, fill, folder_weights
from argosy.config.schema import RunConfig
from argosy.config.train import LoraConfig
from argosy.data.stores.model_folder import is_model_folder
from argosy.data.stores.store import spelled
from argosy.errors import UserError
from argosy.models.adapters import ADAPTER_PARTS, merged
from argosy.models.decoder import Decoder
from argosy.models.hf import weights_sha256
from argosy.models.initialize import materialize
from argosy.models.lazy_weights import HeldWeights, LazyWeights
from argosy.models.user_code import load_family
from argosy.plan.parameters import Table, adapter_of, run_table, state_table


def find_weights(path: Path, sha256: str = "") -> Checkpoint:
    """Return the checkpoint with the weights that a run starts from: the one at `path`, a run folder or checkpoint; if
    `sha256` is given, that with this manifest, there or beside it.

    Raises: UserError if it is not there, is damaged, or holds an adapter alone.
    """
    found = None
    if sha256:
        run_dir = path.parent.parent if step_of(path.name) is not None else path
        known = [c for c in store.committed(run_dir) if c.manifest.sha256 == sha256]
        if not known:
            raise _others(path, sha256, "no checkpoint there holds these. Name the run folder that does")
        found = known[0]
        if problem := problem_of(found):
            raise UserError(f"{problem}. The adapter needs it: restore it from a copy.")
    found = found or store.find(path, problem_of)
    store.refuse_adapter_alone(path, found)
    return found


def check_folder(place: Path, sha256: str = "") -> str:
    """Return the SHA-256 that stands for the weights in a Hugging Face folder or at its URL (`hf.weights_sha256`).

    Raises: UserError if it is not `sha256`, which an adapter was trained beside; "" is any.
    """
    found = weights_sha256(place)
    if sha256 not in ("", found):
        raise _others(place, sha256, f"the sha256 there is {found[:12]}.... Restore that folder, or name a copy of it")
    return found


def _others(place: Path, sha256: str, what: str) -> UserError:
    return UserError(
        f"model.weights = {spelled(place)}: the adapter was trained beside other weights (sha256 {sha256[:12]}...), "
        f"and {what} in model.weights."
    )


class MergedWeights(LazyWeights):
    """Weights with an adapter merged into them, in their own dtypes or all in one, tensor by tensor."""

    def __init__(self, weights: LazyWeights, adapter: LazyWeights, lora: LoraConfig, dtype: torch.dtype | None):
        super().__init__({name: weights.shape(name) for name in weights})
        self._weights, self._adapter, self._lora, self._dtype = weights, adapter, lora, dtype

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        parts = {part: f"{adapter_of(name)}.{part}" for part in ADAPTER_PARTS}
        if parts["a"] not in self._adapter:
            return self._weights.part(name, offset, shape).to(self.dtype(name))
        first, count = offset[0], shape[0]
        is_stack = len(shape) > 2  # of experts: each has an inner matrix
        a = self._adapter.rows(parts["a"], first, count) if is_stack else self._adapter[parts["a"]]
        b = self._adapter.rows(parts["b"], first, count)
        grown = self._adapter.rows(parts["magnitude"], first, count) if parts["magnitude"] in self._adapter else None
        rows = self._weights.rows(name, first, count).to(self.dtype(name))
        whole = merged(rows, a, b, grown, self._lora.scale)
        for dim in range(1, len(shape)):
            whole = whole.narrow(dim, offset[dim], shape[dim])
        return whole

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or self._weights.dtype(name)

    def has_rows(self, name: str) -> bool:
        return self._weights.has_rows(name)


@contextmanager
def open_weights(
    run: RunConfig, checkpoint: Checkpoint, merged_dtype: torch.dtype | None = None
) -> Iterator[LazyWeights]:
    """Open the weights of a checkpoint's whole model, to be read one by one; an adapter is merged into them.

    merged_dtype: in which dtype it is merged; None: in that of each weight.
    Raises: UserError if the checkpoint lacks a tensor, an adapter's own weights are not there, or the model needs code
    that is not approved.
    """
    if not run.lora.rank:
        with opened(checkpoint) as held:
            yield CheckpointWeights(checkpoint, held, _shapes(state_table(run.model)))
        return
    with open_base(run, checkpoint) as weights, opened(checkpoint) as held:
        adapter = CheckpointWeights(checkpoint, held, adapter_shapes(run))
        yield MergedWeights(weights, adapter, run.lora, merged_dtype)


@contextmanager
def open_base(run: RunConfig, checkpoint: Checkpoint) -> Iterator[LazyWeights]:
    """Open the weights beside the adapter of a checkpoint. Raises: as `open_weights`."""
    shapes = _shapes(state_table(run.model))
    if run.model.weights is None:  # the adapter stands beside the initial weights
        load_family(run)
        model = Decoder(run.model)
        materialize(model, run.model, torch.device("cpu"), run.seed)
        yield HeldWeights(model.state_dict())
        return
    if is_model_folder(run.model.weights):
        check_folder(run.model.weights, checkpoint.manifest.base_sha256)
        yield folder_weights(run.model.weights, shapes)
        return
    base = find_weights(run.model.weights, checkpoint.manifest.base_sha256)
    with opened(base) as held:
        yield CheckpointWeights(base, held, shapes)


def adapter_shapes(run: RunConfig) -> dict[str, tuple[int, ...]]:
    return _shapes({name: parameter for name, parameter in run_table(run).items() if parameter.is_adapter})


def _shapes(table: Table) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in table.items()}


def load_decoder(run: RunConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the whole model of a checkpoint, with fp32 weights, computing in `dtype`; an adapter is merged into them.

    Raises: as `open_weights`.
    """
    load_family(run)
    model = Decoder(run.model, dtype).to_empty(device=device)
    with open_weights(run, checkpoint, torch.float32) as weights:
        fill(wholes(model.state_dict(), MODEL_PREFIX), weights)
    return model
