"""Export a run's model to a Hugging Face folder, and import one as a run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any, Literal

import torch

from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.save import Saver
from argosy.checkpoint.shards import wholes
from argosy.config.data import DataConfig
from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.tokenizer import usage_of
from argosy.errors import StorageError, UserError
from argosy.files import commit_folder, make_folder
from argosy.inference.trained_model import open_checkpoint
from argosy.models import hf
from argosy.parallel.world import World

ExportDtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_checkpoint(path: Path, out: Path, dtype: ExportDtype = "fp32", trust_code: bool = False) -> None:
    """Write the model of a run or checkpoint at `path` as the Hugging Face folder `out`.

    trust_code: approve and run code that the run brings along.
    Raises: UserError if there is no checkpoint, `out` exists, or the family's class cannot express the model;
    StorageError if it cannot be written.
    """
    opened = open_checkpoint(path, trust_code)
    tokenizer = opened.run_dir / TOKENIZER
    known = tokenizer.is_file()
    hf.export_folder(
        opened.run.model,
        opened.model(torch.device("cpu")).state_dict(),  # with the biases of routers, which are no parameters
        out,
        dtype=DTYPES[dtype],
        tokenizer=tokenizer if known else None,
        eod_id=opened.tokenizer.eod_id if known else None,
        usage=usage_of(opened.run_dir),
    )


def import_checkpoint(folder: Path, run_dir: Path) -> None:
    """Turn a Hugging Face folder into the run folder `run_dir` with one checkpoint, of step 0, weights only.

    The result works with `generate`, `evaluate`, `checkpoint export`, and as the model.weights of a run.
    Raises: UserError if `run_dir` exists, or if our decoder would compute the folder's model differently; StorageError
    if it cannot be written.
    """
    if run_dir.exists():
        raise UserError(f"{run_dir} exists already. Choose another folder, or remove it first.")
    model, weights = hf.import_folder(folder)
    partial = run_dir.absolute().with_name(f".{run_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_folder(partial)
        data = DataConfig(seq_len=min(DataConfig().seq_len, model.max_seq_len))
        save_run(RunConfig(model=model, data=data), partial / "run.toml")
        if (folder / TOKENIZER).is_file():
            shutil.copyfile(folder / TOKENIZER, partial / TOKENIZER)
        for name, text in usage_of(folder).items():
            (partial / name).write_bytes(text)
        manifest = CheckpointManifest(
            step=0, tokens=0, saved_at_s=time.time(), plan="", data_identity="", has_optimizer=False, files={}
        )
        saver = Saver(partial, World(), _must_succeed)
        try:
            saver.save(wholes({name: tensor.float() for name, tensor in weights.items()}, "model."), manifest)
            saver.wait()
        finally:
            saver.close()
        commit_folder(partial, run_dir)
    except OSError as problem:
        raise StorageError(
            f"{run_dir} could not be written ({problem}). Free some space or get the right to write there, or choose "
            "another folder."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _must_succeed(news: str, /, **facts: Any) -> None:
    if news == "save_failed":
        raise StorageError(f"the weights could not be written: {facts['error']}")
