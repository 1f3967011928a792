"""A trained model where it lies: a run's checkpoint, or a Hugging Face folder; its run, tokenizer and weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from argosy.accelerator import numbered
from argosy.checkpoint import store
from argosy.checkpoint.adapter import load_decoder, open_weights
from argosy.checkpoint.load import problem_of
from argosy.checkpoint.store import Checkpoint
from argosy.config.data import DataConfig
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.chat_template import ChatTemplate
from argosy.data.conversations import BadRecord
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.model_folder import is_model_folder
from argosy.data.stores.store import spelled
from argosy.data.tokenizer import Tokenizer, tokenizer_of, usage_of
from argosy.errors import UserError
from argosy.extend.loading import approve
from argosy.files import json_of
from argosy.models.decoder import Decoder
from argosy.models.hf import HF_CONFIG, import_folder
from argosy.models.lazy_weights import LazyWeights

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint, with its run file and tokenizer."""

    checkpoint: Checkpoint
    run: RunConfig
    run_dir: Path

    @property
    def place(self) -> str:
        """The path that names it."""
        return str(self.checkpoint.folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with. Raises: UserError if the run folder has none."""
        path = self.run_dir / TOKENIZER
        if not path.is_file():
            raise _no_tokenizer(self.home)
        return Tokenizer.load(path)

    @property
    def home(self) -> str:
        """The folder with its tokenizer."""
        return str(self.run_dir)

    @contextmanager
    def weights(self) -> Iterator[LazyWeights]:
        """Open the weights, to be read one by one; an adapter is merged into them in fp32.

        Raises: as `open_weights`.
        """
        with open_weights(self.run, self.checkpoint, torch.float32) as weights:
            yield weights

    def model(self, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
        """Return the model with the checkpoint's fp32 weights, computing in `dtype` on `device` (default: a GPU).

        Raises: UserError, as `load_decoder` does.
        """
        return load_decoder(self.run, self.checkpoint, device or default_device(), dtype).eval()


@dataclass(frozen=True)
class PublishedModel:
    """A model in a Hugging Face folder, here or at a URL."""

    place: str
    """Its path or URL."""

    @cached_property
    def _found(self) -> tuple[RunConfig, LazyWeights, bytes | None]:
        return run_of_folder(self.place)

    @property
    def run(self) -> RunConfig:
        """A run of this model, which names no data."""
        return self._found[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises: UserError if it has none."""
        text = self._found[2]
        if text is None:
            raise _no_tokenizer(self.home)
        return Tokenizer(text.decode(errors="replace"), f"{self.home}/{TOKENIZER}")

    @property
    def home(self) -> str:
        """The folder with its tokenizer, or its URL."""
        return spelled(self.place)

    @contextmanager
    def weights(self) -> Iterator[LazyWeights]:
        """Open the weights, to be read one by one."""
        yield self._found[1]


SomeModel = TrainedModel | PublishedModel


def _no_tokenizer(home: str) -> UserError:
    return UserError(
        f"{home}/{TOKENIZER}: no tokenizer there. Copy the model's to it; transformers makes it of other files: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
    )


def run_of_folder(folder: str | Path) -> tuple[RunConfig, LazyWeights, bytes | None]:
    """Return the run that a Hugging Face folder, here or at a URL, stands for, its weights and its tokenizer.json.

    Raises: UserError if our decoder would compute the folder's model differently.
    """
    model, weights = import_folder(folder)
    tokenizer = tokenizer_of(folder)
    if tokenizer is not None:
        check_vocabulary(tokenizer, model.vocab_size, folder)
    data = DataConfig(seq_len=min(DataConfig().seq_len, model.max_seq_len))
    return RunConfig(model=model, data=data), weights, tokenizer


def check_vocabulary(tokenizer: bytes, vocab_size: int, folder: str | Path) -> None:
    """Raise UserError if a folder's tokenizer.json has tokens that its model has no embedding for."""
    found = Tokenizer(tokenizer.decode(errors="replace"), f"{folder}/{TOKENIZER}").least_vocab_size
    if found > vocab_size:
        raise UserError(
            f"{folder}/{TOKENIZER} has {found} tokens, and vocab_size = {vocab_size} in {folder}/{HF_CONFIG}: it is "
            "another model's. Get the whole folder again."
        )


def open_model(
    place: str | Path, trust_code: bool = False, check: Callable[[Checkpoint], str | None] = problem_of
) -> SomeModel:
    """Open what a user names: a run folder, a checkpoint, or a Hugging Face folder or its URL.

    trust_code: as in `open_checkpoint`. check: reads a checkpoint back, and returns what is wrong with it.
    Raises: UserError.
    """
    if is_model_folder(place):
        return PublishedModel(str(place))
    return open_checkpoint(Path(place), trust_code, check)


def open_checkpoint(
    path: Path, trust_code: bool = False, check: Callable[[Checkpoint], str | None] = problem_of
) -> TrainedModel:
    """Open what a user names: a run folder (its newest whole checkpoint) or one checkpoint.

    trust_code: approve the code that the run brings along. Otherwise a model that needs code which this user has not
    approved is refused when it is made. check: as of `open_model`. Raises: UserError.
    """
    checkpoint = store.find(path, check)
    run_dir = checkpoint.folder.parent.parent
    run = load(run_dir / "run.toml")
    if trust_code:
        approve(run.extend.code)
    return TrainedModel(checkpoint, run, run_dir)


def default_device() -> torch.device:
    """Return the first accelerator, or the CPU."""
    return numbered()


def ends_of_text(model: SomeModel) -> frozenset[int]:
    """Return the tokens that end a text: the end of a document, and what the model's generation_config.json names; as
    in transformers, without that file its config.json."""
    return frozenset([model.tokenizer.eod_id, *_named_ends(model, usage_of(model.home))[1]])


def with_end_of_turn(model: TrainedModel, usage: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the usage of an exported model: if it learned conversations, generation_config.json names the token that
    ends an answer too, at which others stop only then."""
    if model.run.train.objective in ("pretrain", "reward"):
        return usage
    special = model.tokenizer.special_tokens
    try:
        end = ChatTemplate.load(model.run_dir).turn_end(special)
    except (UserError, BadRecord):
        return usage
    said, ends = _named_ends(model, usage)
    ends = ends or [model.tokenizer.eod_id]
    if end not in special or special[end] in ends:
        return usage
    said |= {"eos_token_id": [*ends, special[end]]}
    return {**usage, GENERATION_CONFIG: f"{json.dumps(said, indent=2)}\n".encode()}


def _named_ends(model: SomeModel, usage: Mapping[str, bytes]) -> tuple[dict[str, Any], list[int]]:
    """Return how texts are generated, as the files of `usage` have it, and which tokens end them."""
    name = GENERATION_CONFIG if GENERATION_CONFIG in usage else HF_CONFIG
    try:
        said = json_of(usage.get(name, b"{}"))
    except ValueError:
        raise UserError(f"{model.home}/{name}: it is no JSON. Restore the file, or remove it.") from None
    said = said if isinstance(said, dict) else {}
    if name == HF_CONFIG:
        said = {key: said.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ends, vocabulary = said.get("eos_token_id"), range(model.run.model.vocab_size)
    named = ends if isinstance(ends, list) else [ends]
    return said, [token for token in named if type(token) is int and token in vocabulary]
