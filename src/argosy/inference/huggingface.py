"""Export a run's model to a Hugging Face folder, and import one as a run: tensor by tensor, whatever its size.
Adapters are merged into a run's weights, and go in and out in PEFT's format.

The README.md of an exported model says what its run knows of itself, with the front matter that the hub reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from argosy.checkpoint import store
from argosy.checkpoint.adapter import adapter_shapes, check_folder, find_weights, open_base, open_weights
from argosy.checkpoint.load import opened
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.weights import CheckpointWeights, write_weights
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.train import LoraConfig
from argosy.credentials import redact
from argosy.data.chat_template import ChatTemplate
from argosy.data.conversations import BadRecord
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.model_folder import HUB, ExportDtype, ExportFormat, GgufType, is_model_folder, refuse_existing
from argosy.data.stores.store import is_url, spelled
from argosy.data.tokenizer import BASE_CARD, CARD, usage_of
from argosy.errors import UserError
from argosy.files import read_at_most, whole_folder
from argosy.inference.trained_model import TrainedModel, open_checkpoint, open_model, run_of_folder, with_end_of_turn
from argosy.models import hf, peft_adapter
from argosy.models.gguf_file import export_gguf
from argosy.models.lazy_weights import HeldWeights, LazyWeights
from argosy.models.quantised import WEIGHT_COMPRESSIONS
from argosy.models.user_code import load_family
from argosy.observe.events import from_the_end
from argosy.observe.panel import duration
from argosy.observe.report import Report
from argosy.plan.parameters import parameters
from argosy.precision import FLOAT_DTYPES

EXPORT_DTYPES = {"stored": None} | FLOAT_DTYPES


def export_checkpoint(
    path: str | Path,
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
    found = open_checkpoint(Path(path), trust_code)
    load_family(found.run)
    run_dir = found.run_dir
    tokenizer = run_dir / TOKENIZER if (run_dir / TOKENIZER).is_file() else None
    eod_id = None if tokenizer is None else found.tokenizer.eod_id
    cards = cards_of(found, format, license_name, overwrite)
    kept = EXPORT_DTYPES[dtype or ("stored" if format == "safetensors" else "bf16")]
    with open_weights(found.run, found.checkpoint, kept and EXPORT_DTYPES["fp32"]) as weights:  # rounded once
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
            dtype=kept,
            tokenizer=tokenizer,
            eod_id=eod_id,
            pad_id=_padding(found) if found.run.model.score and tokenizer is not None else None,
            usage={**with_end_of_turn(found, usage), **cards},
            compression=None if format == "safetensors" else WEIGHT_COMPRESSIONS[format],
        )


def _padding(found: TrainedModel) -> int | None:
    """Return the token that is to fill a reward model's rows; None where a conversation may end with it."""
    tokenizer, said = found.tokenizer, [{"role": role, "content": "."} for role in ("user", "assistant")]
    try:
        template = ChatTemplate.load(found.run_dir)
        shown = tokenizer.encode_template(template.render(said))
    except (UserError, BadRecord):
        return tokenizer.eod_id
    pad_id = tokenizer.special_tokens.get(template.special.get("pad_token", ""), tokenizer.eod_id)
    return None if shown[-1:] == [pad_id] else pad_id


def check_format(format: ExportFormat, dtype: ExportDtype | None, gguf_type: GgufType | None) -> None:
    """Raise UserError for settings of an export that do not go together."""
    if gguf_type is not None and format != "gguf":
        raise UserError(
            f"--type {gguf_type} with --format {format}: it is the type of matrices in a gguf file. Leave it out."
        )
    if dtype is not None and format == "gguf":
        raise UserError(
            f"--dtype {dtype} with --format gguf: the types of such a file are --type {', '.join(get_args(GgufType))}."
        )


def import_checkpoint(folder: str | Path, run_dir: str | Path) -> None:
    """Turn a Hugging Face folder, here or at a URL, into the run folder `run_dir` with one checkpoint, of step 0,
    weights only.

    The result works with `generate`, `evaluate`, `checkpoint export`, and as the model.weights of a run.
    Raises: UserError if `run_dir` exists, or if our decoder would compute the folder's model differently; StorageError
    if it cannot be written.
    """
    run_dir = Path(run_dir)
    refuse_existing(run_dir)
    run, weights, tokenizer = run_of_folder(folder)
    write_run(run, weights, run_dir, tokenizer, usage_of(folder))


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
    with whole_folder(run_dir) as partial:
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


HUB_DATA = f"{HUB}datasets/"
MOST_CARD_BYTES = 2**24
"""No report or README of ours is larger."""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def cards_of(found: TrainedModel, kind: str, license_name: str = "", overwrite: bool = False) -> dict[str, bytes]:
    """Return README.md, and that of the weights that the run started from, if it came with them.

    A README.md in the run's folder is the user's, and taken as it is. Weights that were imported and not trained keep
    the README that they came with, or none. kind: the format, as `export --format` has it. license_name: as the hub
    names it. overwrite: write the card all the same.
    """
    files = {
        name: read_at_most(found.run_dir / name, MOST_CARD_BYTES)
        for name in (CARD, BASE_CARD)
        if (found.run_dir / name).is_file()
    }
    if overwrite or CARD not in files:
        if not found.checkpoint.step and not overwrite:
            return {CARD: files[BASE_CARD]} if BASE_CARD in files else {}
        files[CARD] = _card(found, kind, license_name, BASE_CARD in files).encode()
    return files


def _card(found: TrainedModel, kind: str, license_name: str, has_base: bool) -> str:
    report = _report(found)
    sections = {
        "Model": _model(found, kind),
        "Data": _data(found),
        "Training": _training(found),
        "Results": _results(found, report),
        "Time, energy and cost": _costs(report),
    }
    front = yaml.safe_dump(_front_matter(found, kind, license_name), sort_keys=False, allow_unicode=True)
    blocks = [f"---\n{front}---", f"# {_plain(found.run.name)}", _first_sentence(found, has_base)]
    for title, rows in sections.items():
        if rows:
            lines = [f"| {name} | {_plain(value)} |" for name, value in rows.items() if value not in ("", None)]
            blocks.append("\n".join([f"## {title}\n", "| | |", "|---|---|", *lines]))
    return "\n\n".join(blocks) + "\n"


def _front_matter(found: TrainedModel, kind: str, license_name: str) -> dict[str, Any]:
    front: dict[str, Any] = {"license": license_name or "unknown"}
    base = spelled(found.run.model.weights or "")
    name, _ = hub_name(base)
    if base.startswith(HUB) and _REPOSITORY.fullmatch(name):
        front |= {"base_model": name, "base_model_relation": "adapter" if kind == "peft" else "finetune"}
    datasets = ["/".join(place.removeprefix(HUB_DATA).split("/")[:2]).partition("@")[0] for place in _hub_data(found)]
    if datasets := [name for name in dict.fromkeys(datasets) if _REPOSITORY.fullmatch(name)]:
        front["datasets"] = datasets
    front["library_name"] = kind if kind in ("gguf", "peft") else "transformers"
    task = "text-classification" if found.run.model.score else "text-generation"
    return front | {"pipeline_tag": task, "tags": ["argosy"]}


def hub_name(place: str) -> tuple[str, str]:
    """Return how libraries of the hub name `hf://OWNER/NAME@REVISION`, and the revision; of another place itself."""
    name, _, revision = place.removeprefix(HUB).partition("@") if place.startswith(HUB) else (place, "", "")
    return name, revision


def _hub_data(found: TrainedModel) -> Iterator[str]:
    return (place for place in map(spelled, found.run.data.prepare.input) if place.startswith(HUB_DATA))


def _first_sentence(found: TrainedModel, has_base: bool) -> str:
    run = found.run
    how = {"pretrain": "on text", "sft": "on conversations"}.get(run.train.objective, f"by {run.train.objective}")
    if run.model.weights is None and not found.checkpoint.step and not run.lora.rank:
        return f"Weights of a {run.model.family} model, imported by [Argosy](https://pypi.org/project/argosy/)."
    start = "from random weights" if run.model.weights is None else f"from `{_shown(run.model.weights)}`"
    kept = f" What that model's authors say of it is in [{BASE_CARD}]({BASE_CARD})." if has_base else ""
    what = f"Model of the family {run.model.family}, trained {how} {start}"
    return f"{what} by [Argosy](https://pypi.org/project/argosy/).{kept}"


def _model(found: TrainedModel, kind: str) -> dict[str, Any]:
    model, lora = found.run.model, found.run.lora
    return {
        "parameters": f"{parameters(model):,}",
        "layers, width, vocabulary": f"{model.layers}, {model.width}, {model.vocab_size}",
        "context": f"{model.max_seq_len:,} tokens",
        "adapter": f"{lora.kind}, rank {lora.rank}, alpha {lora.alpha:g}" if lora.rank else "",
        "format": kind,
    }


def _data(found: TrainedModel) -> dict[str, Any]:
    data = found.run.data
    stages = {f"prepared, from step {stage.from_step}": stage.sources for stage in data.stages}
    return {
        "input": ", ".join(f"`{_shown(place)}`" for place in data.prepare.input),
        "prepared": _mixture(data.sources),
        **{title: _mixture(sources) for title, sources in stages.items()},
    }


def _mixture(sources: Mapping[str, float]) -> str:
    return ", ".join(f"`{_shown(name)}`" + (f" × {w:g}" if len(sources) > 1 else "") for name, w in sources.items())


def _training(found: TrainedModel) -> dict[str, Any]:
    run, manifest = found.run, found.checkpoint.manifest
    if not manifest.step:
        return {}
    return {
        "objective": run.train.objective,
        "steps": f"{manifest.step:,}",
        "tokens": f"{manifest.tokens:,}",
        "batch": f"{run.train.global_batch} sequences of {run.data.seq_len} tokens",
        "optimizer": f"{run.optimizer.kind}, learning rate {run.optimizer.lr:g}, {run.schedule.kind} schedule",
        "plan": f"`{manifest.plan}`",
    }


def _results(found: TrainedModel, report: Report | None) -> dict[str, Any]:
    step = found.checkpoint.step
    loss, score = None, dict[str, Any]()
    for line in from_the_end(found.run_dir / "metrics.jsonl"):
        if int(line.get("step", step)) < step:  # later steps are not this checkpoint's
            score = score or (line if "validation_loss" in line else {})
            loss = line.get("loss")
            if loss is not None:
                break
    if report is not None and report.validation:
        score = {"validation_loss": report.validation["loss"], **report.validation}
    accuracy, train = score.get("validation_accuracy", score.get("accuracy")), found.run.train
    trained_on = " nats per token" if train.loss == "cross_entropy" and not train.has_preferences else ""
    return {
        "training loss": "" if loss is None else f"{loss:.4f}{trained_on}",
        "validation loss": f"{score['validation_loss']:.4f} nats per {'token' if accuracy is None else 'pair'}"
        if score
        else "",
        "validation accuracy": "" if accuracy is None else f"{accuracy:.2%} of pairs",
        "bits per byte": f"{score['bits_per_byte']:.4f}" if score.get("bits_per_byte") is not None else "",
    }


def _costs(report: Report | None) -> dict[str, Any]:
    if report is None:
        return {}
    return {
        "devices": report.device,
        "software": report.software,
        "time of steps": duration(report.seconds["step"]),
        "time since the first start": duration(report.wall_s),
        "throughput": f"{report.tokens_per_s:,.0f} tokens per second",
        "energy and cost": report.energy.in_words().removeprefix("energy: ") if report.energy else "",
    }


def _report(found: TrainedModel) -> Report | None:
    """Return the run's report, if it is that of this checkpoint."""
    try:
        report = Report.load(found.run_dir)
    except (OSError, UserError):  # the run goes on, was stopped hard, or is of another version
        return None
    return report if report.steps == found.checkpoint.step else None


def _shown(place: str | Path) -> str:
    """Return a place as others may read it: without credentials, a path of this machine by its last name."""
    text = spelled(place)
    return redact(text) if "://" in text or text.startswith("builtin:") else Path(text).name


def _plain(text: object) -> str:
    """Return text that stays in its cell."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())


def merge_checkpoint(path: Path, out: Path, trust_code: bool = False) -> None:
    """Write the adapter of a run or checkpoint at `path`, merged into its weights, as the run folder `out`: tensor by
    tensor, in the weights' own dtypes. The folder gets the model card, as training ends there.

    Raises: UserError if there is no adapter, or `out` exists; StorageError if it cannot be written.
    """
    refuse_existing(out)
    found = _adapter_at(path, trust_code)
    run = found.run.with_keys(model={"weights": None}, lora=LoraConfig())
    with open_weights(found.run, found.checkpoint) as weights:
        usage = usage_of(found.run_dir) | cards_of(found, "safetensors")
        write_run(run, weights, out, _tokenizer(found.run_dir), usage)


def export_adapter(
    path: Path, out: str | Path, trust_code: bool = False, license_name: str = "", overwrite: bool = False
) -> None:
    """Write the adapter of a run or checkpoint at `path` as PEFT's folder `out`, or to its URL in a store, with a model
    card (`cards_of`).

    Raises: UserError if there is no adapter, or `out` exists; StorageError if it cannot be written.
    """
    found = _adapter_at(path, trust_code)
    run, cards = found.run, cards_of(found, "peft", license_name, overwrite)
    with open_base(run, found.checkpoint) as weights, opened(found.checkpoint) as held:
        adapter = CheckpointWeights(found.checkpoint, held, adapter_shapes(run))
        base = hub_name(spelled(run.model.weights or ""))
        peft_adapter.export_adapter(run.model, run.lora, adapter, weights, out, base, cards)


def import_adapter(folder: str | Path, base: Path, out: Path) -> None:
    """Turn PEFT's `folder`, here or at a URL, an adapter of the weights in `base`, a run, a checkpoint or a Hugging
    Face folder or its URL, into the run folder `out`.

    Raises: UserError if it is not an adapter of these weights, or `out` exists; StorageError if it cannot be written.
    """
    refuse_existing(out)
    if open_model(base, check=lambda checkpoint: None).run.model.score:
        raise UserError(f"{base} is a reward model, which has no adapters here. Merge {folder} with PEFT.")
    if is_model_folder(base):
        run, weights, tokenizer = run_of_folder(base)
        lora, tensors = peft_adapter.import_adapter(folder, run.model, weights)
        beside, sha256, usage = base if is_url(base) else base.absolute(), check_folder(base), usage_of(base)
    else:
        whole, found = open_checkpoint(base), find_weights(base)
        run = whole.run
        with open_weights(run, found) as weights:
            lora, tensors = peft_adapter.import_adapter(folder, run.model, weights)
        beside, sha256, usage = found.folder.absolute(), found.manifest.sha256, usage_of(whole.run_dir)
        tokenizer = _tokenizer(whole.run_dir)
    run = run.with_keys(model={"weights": beside}, lora=lora)
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
        """Return the facts as JSON has them."""
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
    check_adapter(path, found.run)
    return found


def check_adapter(path: Path, run: RunConfig) -> None:
    """Raise UserError if the run at `path` trains no adapter."""
    if not run.lora.rank:
        raise UserError(f"{path}: the run has no adapter (lora.rank = 0): its weights are whole already.")


def _tokenizer(run_dir: Path) -> bytes | None:
    file = run_dir / TOKENIZER
    return file.read_bytes() if file.is_file() else None
