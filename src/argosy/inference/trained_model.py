"""A trained model, out of a run's folder: its weights, sizes and tokenizer; to generate text, and to evaluate it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from argosy.accelerator import numbered
from argosy.checkpoint import store
from argosy.checkpoint.adapter import load_model
from argosy.checkpoint.load import problem_of
from argosy.checkpoint.store import Checkpoint
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.cache import Cache
from argosy.data.stores.source import open_source
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import Tokenizer, how_to_prepare
from argosy.errors import UserError
from argosy.extend.trust import approve
from argosy.models.decoder import Decoder
from argosy.models.generate import sample_tokens
from argosy.parallel.mesh import Meshes
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import HeldOut, Score
from argosy.training.evaluation import evaluate as score


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

        Raises: UserError, as `load_model` does.
        """
        return load_model(self.run, self.checkpoint, device or default_device(), dtype).eval()


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
    """Return the first accelerator, or the CPU."""
    return numbered()


def generate(
    path: str | Path,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: Sequence[str] = (),
    trust_code: bool = False,
) -> str:
    """Continue `prompt` with the model of a run or checkpoint at `path`; see `stream` for the arguments."""
    pieces = stream(
        path,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        trust_code=trust_code,
    )
    return "".join(pieces)


def stream(
    path: str | Path,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    stop: Sequence[str],
    trust_code: bool = False,
) -> Iterator[str]:
    """Yield the continuation of `prompt`, piece by piece, as the model generates it.

    It ends with the end-of-document token, after `max_tokens`, or before the first of the strings `stop`.
    temperature 0 takes the most likely token each time; top_p as in `sample_tokens`. trust_code: approve and run code
    that the run brings along.

    Raises: UserError if there is no such checkpoint, or the prompt leaves no room in the model's context.
    """
    opened = open_checkpoint(Path(path), trust_code)
    tokenizer = opened.tokenizer
    ids = [tokenizer.eod_id, *tokenizer.encode(prompt)]
    room = opened.run.model.max_seq_len - len(ids)
    if room < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens and model.max_seq_len is {opened.run.model.max_seq_len}. Shorten it."
        )
    written: list[int] = []
    shown = ""
    tokens = sample_tokens(
        opened.model(),
        ids,
        min(max_tokens, room),
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=(tokenizer.eod_id,),
    )
    for token in tokens:
        written.append(token)
        text = tokenizer.decode(written)
        ends = [text.index(s) for s in stop if s in text]
        if ends:
            yield text[len(shown) : min(ends)]
            return
        held = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
        safe = text[: len(text) - held]
        if safe.endswith("\N{REPLACEMENT CHARACTER}"):
            continue  # the middle of a character: the next token ends it
        yield safe[len(shown) :]
        shown = safe
    yield tokenizer.decode(written)[len(shown) :]


BATCH_TOKENS = 4096


def evaluate(
    path: str | Path,
    data: str | Path | None = None,
    *,
    split: Literal["train", "validation"] = "validation",
    max_tokens: int = 1_000_000,
    seq_len: int | None = None,
    trust_code: bool = False,
) -> Score:
    """Return loss, perplexity and bits per byte of the model of a run or checkpoint at `path`.

    data: a folder that `argosy prepare` wrote, or its URL in a store; by default the run's own sources. seq_len: tokens
    per window; by default those that the run trained with. trust_code: approve and run code that the run brings along.

    Raises: UserError if the data has another tokenizer, or is too short.
    """
    opened = open_checkpoint(Path(path), trust_code)
    folders = [str(data)] if data is not None else opened.run.data.folders
    if not folders:
        raise UserError(f"{path}: the run names no data. Give a prepared folder with --data.")
    cache = Cache(opened.run.data.cache) if any(map(is_url, folders)) else None
    sources = [open_source(folder, split, cache=cache) for folder in folders]
    for source in sources:
        if source.manifest.tokenizer_sha256 != opened.tokenizer.sha256:
            raise UserError(
                f"{source.name}: prepared with another tokenizer than {opened.run_dir}/tokenizer.json. Prepare the "
                f"text again with that one: {how_to_prepare(opened.run_dir)}"
            )
    length = seq_len or opened.run.data.seq_len
    kinds = {None if source.manifest.rows is None else source.manifest.rows.kind for source in sources}
    if opened.run.model.score and kinds != {"pairs"}:
        raise UserError(
            f"{path} is a reward model, which compares pairs, and {folders[0]} holds none. Give some: --data."
        )
    held_out = HeldOut.read(sources, length, max_tokens, opened.run.model.score)
    if not held_out.tokens:
        raise UserError(f"{folders[0]}: its {split} split is empty. Prepare it with a larger --validation-fraction.")
    model = ParallelModel(Plan(), opened.run, Meshes(), {0: opened.model(torch.device("cpu"))})
    return score(model, held_out, max(1, BATCH_TOKENS // length), World())
