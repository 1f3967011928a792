"""Export a run's model to a Hugging Face folder, and import one as a run: tensor by tensor, whatever its size."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from argosy.checkpoint.adapter import open_weights
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.weights import write_weights
from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.tokenizer import BASE_CARD, usage_of
from argosy.errors import StorageError, UserError
from argosy.files import commit_folder, make_folder
from argosy.inference.model_card import cards_of
from argosy.inference.trained_model import open_checkpoint, run_of_folder
from argosy.models import hf
from argosy.models.compressed import COMPRESSIONS
from argosy.models.gguf_file import GgufType, export_gguf
from argosy.models.lazy_weights import LazyWeights
from argosy.models.own_family import load_family

ExportDtype = Literal["stored", "fp32", "bf16", "fp16"]
DTYPES = {"stored": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ExportFormat = Literal["safetensors", "gguf", "fp8", "int8", "int4"]


def export_checkpoint(
    path: Path,
    out: str | Path,
    dtype: ExportDtype | None = None,
    trust_code: bool = False,
    *,
    format: ExportFormat = "safetensors",
    gguf_type: GgufType | None = None,
    license_name: str = "",
    overwrite: bool = False,
) -> None:
    """Write the model of a run or checkpoint at `path` as the folder `out`, or to its URL in a store.

    dtype: "stored" keeps that of each weight: fp32 after training, those of its folder after an import, which comes out
    as it went in. By default, stored; with fp8, int8 and int4, bf16 for what stays beside them. trust_code: approve and
    run code that the run brings along. format: safetensors is a Hugging Face folder; fp8, int8 and int4 one with
    compressed linear layers; gguf a file for llama.cpp, whose matrices are of `gguf_type` (by default bf16).
    license_name, overwrite: of the model card, see `cards_of`.
    Raises: UserError if there is no checkpoint, `out` exists, or the format cannot express the model; StorageError if
    it cannot be written.
    """
    check_format(format, dtype, gguf_type)
    found = open_checkpoint(path, trust_code)
    load_family(found.run)
    run_dir = found.run_dir
    tokenizer = run_dir / TOKENIZER if (run_dir / TOKENIZER).is_file() else None
    eod_id = None if tokenizer is None else found.tokenizer.eod_id
    cards = cards_of(found, format, license_name, overwrite)
    with open_weights(found.run, found.checkpoint) as weights:
        if format == "gguf":
            config, kind = found.run.model, gguf_type or "bf16"
            usage_dir = None if tokenizer is None else run_dir
            export_gguf(
                config, weights, out, kind, name=found.run.name, tokenizer_dir=usage_dir, eod_id=eod_id, others=cards
            )
            return
        usage = {name: data for name, data in usage_of(run_dir).items() if name != BASE_CARD}
        hf.export_folder(
            found.run.model,
            weights,
            out,
            dtype=DTYPES[dtype or ("stored" if format == "safetensors" else "bf16")],
            tokenizer=tokenizer,
            eod_id=eod_id,
            usage=usage | cards,
            compression=None if format == "safetensors" else COMPRESSIONS[format],
        )


def check_format(format: ExportFormat, dtype: ExportDtype | None, gguf_type: GgufType | None) -> None:
    """Raise UserError for settings of an export that do not go together."""
    if gguf_type is not None and format != "gguf":
        raise UserError(
            f"--type {gguf_type} with --format {format}: it is the type of matrices in a gguf file. Leave it out."
        )
    if dtype is not None and format == "gguf":
        raise UserError(
            f"--dtype {dtype} with --format gguf: the types of such a file are --type bf16, f16, q8_0, q4_0."
        )


def import_checkpoint(folder: str | Path, run_dir: Path) -> None:
    """Turn a Hugging Face folder, here or at a URL, into the run folder `run_dir` with one checkpoint, of step 0,
    weights only.

    The result works with `generate`, `evaluate`, `checkpoint export`, and as the model.weights of a run.
    Raises: UserError if `run_dir` exists, or if our decoder would compute the folder's model differently; StorageError
    if it cannot be written.
    """
    refuse_existing(run_dir)
    run, weights, tokenizer = run_of_folder(folder)
    write_run(run, weights, run_dir, tokenizer, usage_of(folder))


def refuse_existing(folder: Path) -> None:
    """Raise UserError if a folder that is to be written exists."""
    if folder.exists():
        raise UserError(f"{folder} exists already. Choose another folder, or remove it first.")


def write_run(
    run: RunConfig,
    weights: LazyWeights,
    run_dir: Path,
    tokenizer: bytes | None,
    usage: Mapping[str, bytes],
    base_sha256: str = "",
) -> None:
    """Write the run folder `run_dir` with one checkpoint, of step 0 without an optimizer; whole or not at all.

    Raises: StorageError if it cannot be written.
    """
    partial = run_dir.absolute().with_name(f".{run_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_folder(partial)
        save_run(run, partial / "run.toml")
        if tokenizer is not None:
            (partial / TOKENIZER).write_bytes(tokenizer)
        for name, text in usage.items():
            (partial / name).write_bytes(text)
        manifest = CheckpointManifest(
            step=0,
            tokens=0,
            saved_at_s=time.time(),
            plan="",
            data_identity="",
            base_sha256=base_sha256,
            has_optimizer=False,
            files={},
        )
        write_weights(partial, manifest, weights)
        commit_folder(partial, run_dir)
    except OSError as problem:
        raise StorageError(
            f"{run_dir} could not be written ({problem}). Free some space or get the right to write there, or choose "
            "another folder."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
