"""List, verify and prune checkpoints; export and import weights as Hugging Face folders.

Examples:
  argosy checkpoint list runs/demo                      all checkpoints, newest last, and which were read back
  argosy checkpoint verify runs/demo                    read every byte back against its checksum
  argosy checkpoint prune runs/demo --keep-last 1       delete all but the newest
  argosy checkpoint export runs/demo --out demo-hf      weights and tokenizer for transformers, vLLM, ...
  argosy checkpoint export runs/demo --out demo-gguf --format gguf    the same for llama.cpp
  argosy checkpoint import Qwen3-0.6B --out runs/qwen   a run folder to generate with, or to train from
  argosy checkpoint list runs                           the adapters in a folder of runs
  argosy checkpoint merge runs/lora --out runs/merged   an adapter, merged into its weights
  argosy checkpoint export runs/lora --out lora-peft --adapter    an adapter alone, for PEFT and vLLM
  argosy checkpoint import lora-peft --base runs/qwen --out runs/lora     an adapter in PEFT's format
  argosy checkpoint import hf://Qwen/Qwen3-0.6B --out runs/qwen   the same, from the hub
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from argosy.cli.options import ALL, SHORT, fitted, must_be_folder, parse
from argosy.data.stores.store import is_url
from argosy.errors import ArgosyError, UserError
from argosy.observe.screen import Progress
from argosy.observe.terminal import printable

if TYPE_CHECKING:
    from argosy.checkpoint.store import Checkpoint

HIDDEN = ("files", "step", "history")
"""Keys of a manifest that `list` does not show."""


@dataclass(frozen=True)
class Looking:
    """Options of list and verify."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run's folder, or one checkpoint."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Pruning:
    """Options of prune."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """A run's folder."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; at least one verified one always stays."""
    keep_every: int = 0
    """Checkpoints at multiples of this many steps are kept too; 0: none."""
    dry_run: bool = False
    """Say what would be deleted, and delete nothing."""


@dataclass(frozen=True)
class Exporting:
    """Options of export."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run's folder (its newest checkpoint) or one checkpoint."""
    out: str
    """The folder to write, or its URL in a store (s3://...); it must not exist yet."""
    format: Literal["safetensors", "gguf", "fp8", "int8", "int4"] = "safetensors"
    """safetensors: a Hugging Face folder. gguf: a file for llama.cpp. fp8, int8, int4: a Hugging Face folder whose
    linear layers are compressed, for vLLM (FP8_DYNAMIC, W8A8 and W4A16 of compressed-tensors)."""
    type: Literal["bf16", "f16", "q8_0", "q4_0"] | None = None
    """gguf: the type of matrices; bf16 if none is given."""
    dtype: Literal["stored", "fp32", "bf16", "fp16"] | None = None
    """Number format of the weights; those that are not compressed, with fp8, int8 and int4. stored (the default of
    safetensors): training keeps fp32, an import what came. The others' default is bf16."""
    license: str = ""
    """The model's license in README.md, by its name on Hugging Face's hub, such as apache-2.0."""
    overwrite: bool = False
    """Write README.md anew where the run's folder has one of yours, or weights that were imported came with one."""
    trust_code: bool = False
    """Approve and run code that the run brings along (extend.files); otherwise only code that you trained with."""
    adapter: bool = False
    """Write the run's adapter alone, in PEFT's format; otherwise it is merged into the weights."""


@dataclass(frozen=True)
class Merging:
    """Options of merge."""

    path: Annotated[Path, tyro.conf.Positional]
    """The folder of a run that trains an adapter (its newest checkpoint), or one of its checkpoints."""
    out: Path
    """The run folder to write; it must not exist yet."""
    trust_code: bool = False
    """Approve and run code that the run brings along (extend.files); otherwise only code that you trained with."""


@dataclass(frozen=True)
class Importing:
    """Options of import."""

    folder: Annotated[str, tyro.conf.Positional]
    """A Hugging Face folder (config.json, *.safetensors, tokenizer.json), hf://OWNER/NAME, or its URL in a store. With
    --base, an adapter's in PEFT's format."""
    out: Path
    """The run folder to write; it must not exist yet."""
    base: Path | None = None
    """The run, checkpoint or Hugging Face folder whose weights the adapter in FOLDER was trained beside."""


def main(argv: list[str]) -> int:
    actions: dict[str, Callable[[list[str]], int]] = {
        "list": _list,
        "verify": _verify,
        "prune": _prune,
        "export": _export,
        "import": _import,
        "merge": _merge,
    }
    if not argv or argv[0] in (*SHORT, ALL):
        print(f"usage: argosy checkpoint {{{','.join(actions)}}} ...\n\n{fitted(__doc__ or '')}")
        return 0
    if argv[0] not in actions:
        raise UserError(f"checkpoint {argv[0]}: there is no such action. Try: {', '.join(actions)}.")
    return actions[argv[0]](argv[1:])


def _list(argv: list[str]) -> int:
    """List a run's checkpoints, newest last: step, size, tokens seen, time, and if it is verified (read back after it
    was written, found whole, and not changed since by its files' lengths and times; `verify` reads every byte).

    Of a folder of runs, list those that train adapters.

    Examples:
      argosy checkpoint list runs/demo
      argosy checkpoint list runs
    """
    options = parse(argv, "argosy checkpoint list", Looking, inspect.getdoc(_list))
    must_be_folder(options.path)
    checkpoints = _checkpoints(options.path)
    if not checkpoints and not (options.path / "run.toml").is_file():
        return _list_adapters(options)
    rows: list[dict[str, Any]] = []
    for checkpoint in checkpoints:
        try:
            rest = {key: value for key, value in checkpoint.manifest.to_record().items() if key not in HIDDEN}
            changed = checkpoint.changed_file()
            verified = {"verified": checkpoint.is_verified and changed is None, "changed": changed}
            rows.append({"step": checkpoint.step, "bytes": checkpoint.bytes, **verified, **rest})
        except ArgosyError as damage:
            rows.append({"step": checkpoint.step, "damaged": str(damage)})
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print(printable("\n".join(map(_line, rows))) or f"{options.path}: no committed checkpoint")
    return 0


def _list_adapters(options: Looking) -> int:
    from argosy.inference.adapters import AdapterFacts, adapters_in

    def line(adapter: AdapterFacts) -> str:
        lora, done = adapter.lora, "no checkpoint" if adapter.step is None else f"step {adapter.step}"
        what = f"{lora.kind} rank {lora.rank} alpha {lora.alpha:g} on {', '.join(lora.targets)}"
        return f"{adapter.run_dir.name}  {what}  {done}  {adapter.bytes / 1e6:.1f} MB  beside {adapter.weights}"

    if not any(options.path.glob("*/run.toml")):
        raise UserError(f"{options.path}: neither a run nor a checkpoint. Give a run's folder, such as runs/NAME.")
    found = adapters_in(options.path)
    if options.json:
        print(json.dumps([adapter.to_record() for adapter in found], indent=2))
    else:
        print(printable("\n".join(map(line, found))) or f"{options.path}: no run there trains an adapter")
    return 0


def _checkpoints(path: Path) -> Sequence[Checkpoint]:
    """Return the committed checkpoints of a run's folder, or the one that `path` is."""
    from argosy.checkpoint.store import MANIFEST, Checkpoint, committed

    return [Checkpoint(path)] if (path / MANIFEST).exists() else committed(path)


def _line(row: dict[str, Any]) -> str:
    name = f"step-{row['step']:08d}"
    if "damaged" in row:
        return f"{name}  {row['damaged']}"
    saved = datetime.fromtimestamp(row["saved_at_s"]).strftime("%Y-%m-%d %H:%M:%S")
    verified = "verified" if row["verified"] else "not verified"
    if row["changed"]:
        verified += f": {row['changed']} was changed since; `argosy checkpoint verify` reads it"
    return f"{name}  {row['bytes'] / 1e6:9.1f} MB  {row['tokens'] / 1e6:9.2f}M tokens  {saved}  {verified}"


def _verify(argv: list[str]) -> int:
    """Read every byte of a run's checkpoints, or of one, back against its checksum, and see that the files make up all
    tensors; exit code 1 if any is damaged. A whole one counts as verified from then on.

    Example:
      argosy checkpoint verify runs/demo
    """
    from argosy.checkpoint.checksums import DamagedCheckpoint
    from argosy.checkpoint.load import incomplete

    options = parse(argv, "argosy checkpoint verify", Looking, inspect.getdoc(_verify))
    must_be_folder(options.path)
    checkpoints = _checkpoints(options.path)
    if not checkpoints:
        raise UserError(f"{options.path}: no committed checkpoint there. Give a run's folder or one checkpoint.")
    problems: dict[str, str | None] = {}
    for checkpoint in checkpoints:
        try:
            checkpoint.verify()
            problems[checkpoint.folder.name] = problem = incomplete(checkpoint)
            with suppress(OSError):  # a copy that may only be read is as whole
                if problem is None:
                    checkpoint.mark_verified()
        except DamagedCheckpoint as damage:
            problems[checkpoint.folder.name] = str(damage)
        if not options.json:
            print(printable(problems[checkpoint.folder.name] or f"{checkpoint.folder.name}: whole"))
    if options.json:
        print(json.dumps(problems, indent=2))
    return 1 if any(problems.values()) else 0


def _prune(argv: list[str]) -> int:
    """Delete a run's checkpoints except the newest ones. The newest verified one always stays.

    Example:
      argosy checkpoint prune runs/demo --keep-last 1
    """
    from argosy.checkpoint.store import VERIFIED_KEPT, prune
    from argosy.launch.run_folder import locked

    options = parse(argv, "argosy checkpoint prune", Pruning, inspect.getdoc(_prune))
    must_be_folder(options.run_dir)
    if options.keep_last < 1 or options.keep_every < 0:
        raise UserError("--keep-last must be at least 1 and --keep-every at least 0: the newest is always kept.")
    with locked(options.run_dir):
        keep_verified = min(options.keep_last, VERIFIED_KEPT)
        keep = options.keep_last, options.keep_every, keep_verified
        dropped = prune(options.run_dir, *keep, dry_run=options.dry_run)
    what = "would delete" if options.dry_run else "deleted"
    print("\n".join(f"{what} {c.folder.name}" for c in dropped) or "nothing to delete")
    return 0


def _export(argv: list[str]) -> int:
    """Write a checkpoint's weights and tokenizer as a Hugging Face folder, for transformers, vLLM and others, or as a
    gguf file, for llama.cpp; with a README.md that says how it was trained.

    An adapter is merged into the weights, or with --adapter written alone, in PEFT's format.

    Examples:
      argosy checkpoint export runs/demo --out demo-hf
      argosy checkpoint export runs/demo --out demo-gguf --format gguf --type q8_0
      argosy checkpoint export runs/demo --out demo-int8 --format int8
      argosy checkpoint export runs/lora --out lora-peft --adapter
    """
    options = parse(argv, "argosy checkpoint export", Exporting, inspect.getdoc(_export))
    must_be_folder(options.path)
    if options.adapter and (options.format != "safetensors" or options.type or options.dtype):
        raise UserError(
            f"--adapter with --format {options.format}: PEFT's format has one form, safetensors in fp32. Leave "
            "--adapter out, and the adapter is merged into the weights."
        )
    with Progress(enabled=True).during(f"exporting {options.path}"):
        if options.adapter:
            from argosy.inference.adapters import export_adapter

            out, card = Path(options.out), (options.license, options.overwrite)
            export_adapter(options.path, out, options.trust_code, *card)
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
    print(f"wrote {options.out}", file=sys.stderr)
    return 0


def _merge(argv: list[str]) -> int:
    """Write the adapter of a run, merged into its weights, as another run folder, to generate with, to train from, to
    export. Tensors are read and written one by one.

    Example:
      argosy checkpoint merge runs/lora --out runs/merged
    """
    options = parse(argv, "argosy checkpoint merge", Merging, inspect.getdoc(_merge))
    must_be_folder(options.path)
    with Progress(enabled=True).during(f"merging {options.path}"):
        from argosy.inference.adapters import merge_checkpoint

        merge_checkpoint(options.path, options.out, options.trust_code)
    print(f"wrote {options.out}", file=sys.stderr)
    return 0


def _import(argv: list[str]) -> int:
    """Turn a Hugging Face folder into a run folder, to generate with, or to train from (`model.weights`); with --base,
    an adapter in PEFT's format.

    Examples:
      argosy checkpoint import Qwen3-0.6B --out runs/qwen
      argosy checkpoint import lora-peft --base runs/qwen --out runs/lora
    """
    options = parse(argv, "argosy checkpoint import", Importing, inspect.getdoc(_import))
    if not is_url(options.folder):
        must_be_folder(Path(options.folder))
    with Progress(enabled=True).during(f"importing {options.folder}"):
        if options.base is not None:
            from argosy.inference.adapters import import_adapter

            import_adapter(Path(options.folder), options.base, options.out)
        else:
            from argosy.inference.huggingface import import_checkpoint

            import_checkpoint(options.folder, options.out)
    print(f"wrote {options.out}", file=sys.stderr)
    return 0
