"""Held-out text, and the score of a trained model on it under any plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from argosy.data.manifest import TOKENIZER
from argosy.data.stores.cache import Cache
from argosy.data.stores.source import open_source
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import how_to_prepare
from argosy.errors import UserError
from argosy.inference.rank_model import score
from argosy.inference.trained_model import SomeModel, default_device, open_model
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.evaluation import HeldOut, Score


@dataclass(frozen=True)
class EvaluateRequest:
    """The text that is scored."""

    folders: list[str]
    """Prepared folders or their URLs."""
    split: Literal["train", "validation"]
    max_tokens: int
    seq_len: int
    """Tokens per window."""

    def read(self, source: SomeModel) -> HeldOut:
        """Read the text. Raises: UserError if it has another tokenizer than the model, or is too short."""
        cache = Cache(source.run.data.cache) if any(map(is_url, self.folders)) else None
        splits = [open_source(folder, self.split, cache=cache) for folder in self.folders]
        for data in splits:
            if data.manifest.tokenizer_sha256 != source.tokenizer.sha256:
                raise UserError(
                    f"{data.name}: prepared with another tokenizer than {source.home}/{TOKENIZER}. Prepare the "
                    f"text again with that one: {how_to_prepare(source.home)}"
                )
        kinds = {None if split.manifest.rows is None else split.manifest.rows.kind for split in splits}
        if source.run.model.score and kinds != {"pairs"}:
            raise UserError(
                f"{source.home} is a reward model, which compares pairs, and {self.folders[0]} holds none. Give "
                "prepared pairs: --data."
            )
        held_out = HeldOut.read(splits, self.seq_len, self.max_tokens, source.run.model.score)
        if not held_out.tokens:
            raise UserError(
                f"{self.folders[0]}: its {self.split} split is empty. Prepare it with a larger --validation-fraction."
            )
        return held_out


def evaluate(
    path: str | Path,
    data: str | Path | None = None,
    *,
    split: Literal["train", "validation"] = "validation",
    max_tokens: int = 1_000_000,
    seq_len: int | None = None,
    plan: str | Plan = "",
    trust_code: bool = False,
) -> Score:
    """Return loss, perplexity and bits per byte of the model of a run, a checkpoint or a Hugging Face folder at `path`.

    data: a folder that `argosy prepare` wrote, or its URL in a store; by default the run's own sources. seq_len: tokens
    per window; by default those that the run trained with. plan: as of `load_model`. trust_code: approve and run code
    that the run brings along.

    Raises: UserError if the data has another tokenizer, or is too short, or the plan cannot lay the model out.
    """
    source = open_model(path, trust_code)
    folders = [str(data)] if data is not None else source.run.data.folders
    if not folders:
        raise UserError(f"{path}: the run names no data. Give a prepared folder with --data.")
    length = seq_len or source.run.data.seq_len
    asked = EvaluateRequest(list(folders), split, max_tokens, length)
    layout = Plan.parse(plan) if isinstance(plan, str) else plan
    return score(source, layout, World(device=default_device()), asked.read(source))
