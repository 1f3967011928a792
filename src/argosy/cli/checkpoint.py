"""List, verify and prune checkpoints; export and import weights as Hugging Face folders.

Examples:
  argosy checkpoint list runs/demo                      all checkpoints, newest last, and which were read back
  argosy checkpoint verify runs/demo                    read every byte back against its checksum
  argosy checkpoint prune runs/demo --keep-last 1       delete all but the newest
  argosy checkpoint export runs/demo --out demo-hf      weights and tokenizer for transformers, vLLM, ...
  argosy checkpoint export runs/demo --out demo-gguf --format gguf --type q8_0    the same for llama.cpp
  argosy checkpoint export runs/demo --out demo-int8 --format int8    linear layers in 8 bits, for vLLM
  argosy checkpoint import Qwen3-0.6B --out runs/qwen   a run folder to generate with, or to train from
  argosy checkpoint import hf://Qwen/Qwen3-0.6B --out runs/qwen   the same, from the hub
  argosy checkpoint list runs                           the adapters in a folder of runs
  argosy checkpoint merge runs/lora --out runs/merged   an adapter, merged into its weights
  argosy checkpoint export runs/lora --out lora-peft --adapter    an adapter alone, for PEFT and vLLM
  argosy checkpoint import lora-peft --base runs/qwen --out runs/lora     an adapter in PEFT's format
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from argosy.cli.documents import DryRun, WrittenFile, answer, show_dry_run, write
from argosy.cli.options import (
    PrintJson,
    RunPath,
    TrustCode,
    about_action,
    act,
    must_be_folder,
    parse,
)
from argosy.data.stores.model_folder import ExportDtype, ExportFormat, GgufType, refuse_existing
from argosy.data.stores.store import is_url
from argosy.errors import ArgosyError, UserError
from argosy.observe.screen import Progress

if TYPE_CHECKING:
    from argosy.checkpoint.store import Checkpoint


@dataclass(frozen=True)
class LookOptions:
    path: Annotated[Path, tyro.conf.Positional]
    """A run's folder, or one checkpoint."""
    json: bool = False
    """Print JSON, a checkpoint a line."""


@dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint in a list."""

    step: int
    damaged: str | None = None
    """Why its manifest cannot be read; then nothing below is known."""
    bytes: int | None = None
    verified: bool = False
    """True if it was read back after it was written, and has not changed since."""
    changed: str | None = None
    """A file that was changed since."""
    tokens: int | None = None
    """Tokens trained on."""
    saved_at_s: float | None = None
    """Seconds since 1970."""
    plan: str | None = None
    data_identity: str | None = None
    config_sha256: str | None = None
    base_sha256: str | None = None
    """SHA-256 of the manifest of the weights beside an adapter."""
    has_optimizer: bool | None = None
    """False for imported weights."""
    generation: int | None = None
    rounds: int | None = None
    """Rounds between sites."""
    skipped: list[tuple[int, int]] | None = None
    """Ranges of samples that no update is made from."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose bytes were read."""

    checkpoint: str
    whole: bool
    problem: str | None
    """The damage, in words."""


@dataclass(frozen=True)
class PrunedCheckpoints:
    """Checkpoints that were deleted."""

    deleted: list[str]


@dataclass(frozen=True)
class PruneOptions:
    run_dir: RunPath
    keep_last: int = 2
    """Number of newest checkpoints to keep; at least one verified one always stays."""
    keep_every: int = 0
    """Checkpoints at multiples of this many steps are kept too; 0: none."""
    dry_run: bool = False
    """Say what would be deleted, and delete nothing."""
    json: PrintJson = False


@dataclass(frozen=True)
class ExportOptions:
    path: Annotated[Path, tyro.conf.Positional]
    """A run's folder (its newest checkpoint) or one checkpoint."""
    out: str
    """The folder to write, or its URL in a store (s3://...); it must not exist yet."""
    format: ExportFormat = "safetensors"
    """safetensors: a Hugging Face folder. gguf: a file for llama.cpp. fp8, int8, int4: a Hugging Face folder whose
    linear layers are compressed, for vLLM (FP8_DYNAMIC, W8A8 and W4A16 of compressed-tensors)."""
    type: GgufType | None = None
    """gguf: the type of matrices; bf16 if none is given."""
    dtype: ExportDtype | None = None
    """Number format of the weights; those that are not compressed, with fp8, int8 and int4. stored (the default of
    safetensors): training keeps fp32, an import what came. The others' default is bf16."""
    license: str = ""
    """The model's license in README.md, by its name on Hugging Face's hub, such as apache-2.0."""
    overwrite: bool = False
    """Write README.md anew where the run's folder has one of yours, or weights that were imported came with one."""
    trust_code: TrustCode = False
    adapter: bool = False
    """Write the run's adapter alone, in PEFT's format; otherwise it is merged into the weights."""
    dry_run: bool = False
    """Say what would be written, and write nothing."""
    json: PrintJson = False


@dataclass(frozen=True)
class MergeOptions:
    path: Annotated[Path, tyro.conf.Positional]
    """The folder of a run that trains an adapter (its newest checkpoint), or one of its checkpoints."""
    out: Path
    """The run folder to write; it must not exist yet."""
    trust_code: TrustCode = False
    dry_run: bool = False
    """Say what would be written, and write nothing."""
    json: PrintJson = False


@dataclass(frozen=True)
class ImportOptions:
    folder: Annotated[str, tyro.conf.Positional]
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json), hf://OWNER/NAME, or its URL in a store. With
    --base, an adapter's in PEFT's format."""
    out: Path
    """The run folder to write; it must not exist yet."""
    base: Path | None = None
    """The run, checkpoint, Hugging Face folder or its URL whose weights the adapter in FOLDER was trained beside."""
    dry_run: bool = False
    """Say what would be written, and write nothing."""
    json: PrintJson = False


def main(argv: list[str]) -> int:
    actions = {"list": _list, "verify": _verify, "prune": _prune, "export": _export, "import": _import, "merge": _merge}
    return act("checkpoint", actions, argv)


def _list(argv: list[str]) -> int:
    """List a run's checkpoints, newest last: step, size, tokens seen, time, and if it is verified (read back after it
    was written, found whole, and not changed since by its files' lengths and times; `verify` reads every byte).

    Of a folder of runs, list those that train adapters.
    """
    options = parse(argv, "argosy checkpoint list", LookOptions, about_action(_list))
    must_be_folder(options.path)
    checkpoints = _checkpoints(options.path)
    if not checkpoints and not (options.path / "run.toml").is_file():
        return _list_adapters(options)
    rows = list(map(_listed, checkpoints))
    words = "\n".join(map(_line, rows)) or f"{options.path}: no committed checkpoint"
    answer(options.json, "checkpoint-list", words, *rows)
    return 0


def _listed(checkpoint: Checkpoint) -> ListedCheckpoint:
    try:
        changed, manifest = checkpoint.changed_file(), vars(checkpoint.manifest)
        shown = {field.name: manifest[field.name] for field in fields(ListedCheckpoint) if field.name in manifest}
        is_verified = checkpoint.is_verified and changed is None
        return ListedCheckpoint(
            **{**shown, "step": checkpoint.step}, bytes=checkpoint.bytes, verified=is_verified, changed=changed
        )
    except ArgosyError as damage:
        return ListedCheckpoint(checkpoint.step, str(damage))


def _list_adapters(options: LookOptions) -> int:
    from argosy.inference.huggingface import AdapterFacts, adapters_in

    def line(adapter: AdapterFacts) -> str:
        lora, done = adapter.lora, "no checkpoint" if adapter.step is None else f"step {adapter.step}"
        what = f"{lora.kind} rank {lora.rank} alpha {lora.alpha:g} on {', '.join(lora.targets)}"
        return f"{adapter.run_dir.name}  {what}  {done}  {adapter.bytes / 1e6:.1f} MB  beside {adapter.weights}"

    if not any(options.path.glob("*/run.toml")):
        raise UserError(f"{options.path}: neither a run nor a checkpoint. Give a run's folder, such as runs/NAME.")
    found = adapters_in(options.path)
    words = "\n".join(map(line, found)) or f"{options.path}: no run there trains an adapter"
    answer(options.json, "checkpoint-list-adapters", words, *found)
    return 0


def _checkpoints(path: Path) -> Sequence[Checkpoint]:
    """Return the committed checkpoints of a run's folder, or the one that `path` is.

    Raises: UserError if its name is no step: a copy under another name, or prepared data.
    """
    from argosy.checkpoint.checksums import step_of
    from argosy.checkpoint.store import MANIFEST, Checkpoint, committed

    if not (path / MANIFEST).exists():
        return committed(path)
    if step_of(path.resolve().name) is None:
        raise UserError(f"{path}: not a checkpoint. The folder of one has its step as its name, such as step-00000100.")
    return [Checkpoint(path.resolve())]


def _line(row: ListedCheckpoint) -> str:
    name = f"step-{row.step:08d}"
    if row.bytes is None or row.tokens is None or row.saved_at_s is None:
        return f"{name}  {row.damaged}"
    saved = datetime.fromtimestamp(row.saved_at_s).strftime("%Y-%m-%d %H:%M:%S")
    verified = "verified" if row.verified else "not verified"
    if row.changed:
        verified += f": {row.changed} was changed since; `argosy checkpoint verify` reads it"
    return f"{name}  {row.bytes / 1e6:9.1f} MB  {row.tokens / 1e6:9.2f}M tokens  {saved}  {verified}"


def _verify(argv: list[str]) -> int:
    """Read every byte of a run's checkpoints, or of one, back against its checksum, and see that the files make up all
    tensors; exit code 1 if any is damaged. A whole one counts as verified from then on.
    """
    from argosy.checkpoint.checksums import DamagedCheckpoint
    from argosy.checkpoint.load import incomplete

    options = parse(argv, "argosy checkpoint verify", LookOptions, about_action(_verify))
    must_be_folder(options.path)
    checkpoints = _checkpoints(options.path)
    if not checkpoints:
        raise UserError(f"{options.path}: no committed checkpoint there. Give a run's folder or one checkpoint.")
    is_damaged = False
    for checkpoint in checkpoints:
        name = checkpoint.folder.name
        try:
            checkpoint.verify()
            problem = incomplete(checkpoint)
            with suppress(OSError):  # a copy that may only be read is as whole
                if problem is None:
                    checkpoint.mark_verified()
        except DamagedCheckpoint as damage:
            problem = str(damage)
        is_damaged |= problem is not None
        verified = VerifiedCheckpoint(name, problem is None, problem)
        answer(options.json, "checkpoint-verify", problem or f"{name}: whole", verified)
    return int(is_damaged)


def _prune(argv: list[str]) -> int:
    """Delete a run's checkpoints except the newest ones. The newest verified one always stays."""
    from argosy.checkpoint.store import VERIFIED_KEPT, prune
    from argosy.launch.run_folder import locked

    options = parse(argv, "argosy checkpoint prune", PruneOptions, about_action(_prune))
    must_be_folder(options.run_dir)
    if options.keep_last < 1 or options.keep_every < 0:
        raise UserError("--keep-last must be at least 1 and --keep-every at least 0: the newest is always kept.")
    if not (options.run_dir / "checkpoints").exists():
        raise UserError(f"{options.run_dir}: no checkpoints there. Give the folder of a run, or of one of its sites.")
    with nullcontext() if options.dry_run else locked(options.run_dir):
        keep_verified = min(options.keep_last, VERIFIED_KEPT)
        keep = options.keep_last, options.keep_every, keep_verified
        dropped = prune(options.run_dir, *keep, dry_run=options.dry_run)
    if options.dry_run:
        show_dry_run(DryRun(tuple(f"delete {c.folder.name}" for c in dropped), options.run_dir), options.json)
    elif options.json:
        write("checkpoint-prune", PrunedCheckpoints([c.folder.name for c in dropped]))
    else:
        print("\n".join(f"deleted {c.folder.name}" for c in dropped) or "nothing to delete")
    return 0


def _export(argv: list[str]) -> int:
    """Write a checkpoint's weights and tokenizer as a Hugging Face folder, for transformers, vLLM and others, or as a
    gguf file, for llama.cpp; with a README.md that says how it was trained.

    An adapter is merged into the weights, or with --adapter written alone, in PEFT's format.
    """
    options = parse(argv, "argosy checkpoint export", ExportOptions, about_action(_export))
    must_be_folder(options.path)
    if options.adapter and (options.format != "safetensors" or options.type or options.dtype):
        raise UserError(
            f"--adapter with --format {options.format}: PEFT's format has one form, safetensors in fp32. Leave "
            "--adapter out, and the adapter is merged into the weights."
        )
    if options.dry_run:
        return _would_write(options)
    with Progress(enabled=True).during(f"exporting {options.path}"):
        if options.adapter:
            from argosy.inference.huggingface import export_adapter

            export_adapter(options.path, options.out, options.trust_code, options.license, options.overwrite)
        else:
            from argosy.inference.huggingface import export_checkpoint

            export_checkpoint(
                options.path,
                options.out,
                options.dtype,
                options.trust_code,
                format=options.format,
                gguf_type=options.type,
                license_name=options.license,
                overwrite=options.overwrite,
            )
    return _wrote("checkpoint-export", options)


def _merge(argv: list[str]) -> int:
    """Write the adapter of a run, merged into its weights, as another run folder, to generate with, to train from, to
    export. Tensors are read and written one by one.
    """
    options = parse(argv, "argosy checkpoint merge", MergeOptions, about_action(_merge))
    must_be_folder(options.path)
    if options.dry_run:
        return _would_write(options)
    with Progress(enabled=True).during(f"merging {options.path}"):
        from argosy.inference.huggingface import merge_checkpoint

        merge_checkpoint(options.path, options.out, options.trust_code)
    return _wrote("checkpoint-merge", options)


def _import(argv: list[str]) -> int:
    """Turn a Hugging Face folder into a run folder, to generate with, or to train from (`model.weights`); with --base,
    an adapter in PEFT's format.
    """
    options = parse(argv, "argosy checkpoint import", ImportOptions, about_action(_import))
    must_be_folder(options.folder, or_url=True)
    if options.dry_run:
        return _would_write(options)
    with Progress(enabled=True).during(f"importing {options.folder}"):
        if options.base is not None:
            from argosy.inference.huggingface import import_adapter

            import_adapter(options.folder, options.base, options.out)
        else:
            from argosy.inference.huggingface import import_checkpoint

            import_checkpoint(options.folder, options.out)
    return _wrote("checkpoint-import", options)


def _would_write(options: ExportOptions | MergeOptions | ImportOptions) -> int:
    """Show what would be written.

    Raises: UserError if there is no checkpoint, or adapter, to write from, or `out` exists.
    """
    from argosy.inference.huggingface import check_adapter, check_format
    from argosy.inference.trained_model import open_checkpoint

    if isinstance(options, ImportOptions):
        source: Path | str = options.folder
    else:
        found = open_checkpoint(options.path, check=lambda checkpoint: None)
        if isinstance(options, ExportOptions):
            check_format(options.format, options.dtype, options.type)
        if isinstance(options, MergeOptions) or options.adapter:
            check_adapter(options.path, found.run)
        source = found.checkpoint.folder
    if not is_url(str(options.out)):
        refuse_existing(Path(options.out))
    show_dry_run(DryRun((f"write {options.out} from {source}",)), options.json)
    return 0


def _wrote(name: str, options: ExportOptions | MergeOptions | ImportOptions) -> int:
    if options.json:
        write(name, WrittenFile(str(options.out)))
    else:
        print(f"wrote {options.out}", file=sys.stderr)
    return 0
