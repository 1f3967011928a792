"""A model that is loaded to be used: logits, and texts as they are written, whatever it is laid out over."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, overload

import torch
from torch import Tensor

from argosy.config.model import ModelConfig
from argosy.errors import UserError
from argosy.inference.members import InProcesses, open_together
from argosy.inference.plans import plan_named, run_of_rows
from argosy.inference.rank_model import RankModel, SampleRequest
from argosy.inference.sampling import USUAL, Completion, Finish, GrowingText, Prompt, Sampling, TextPiece
from argosy.inference.trained_model import default_device, ends_of_text
from argosy.parallel.world import World
from argosy.plan.plan import Plan

BATCH_SIZE = 16
"""Rows that are written at once."""

# B rows, T tokens, V vocabulary


class Backend(Protocol):
    """The place where a model computes."""

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of all rows, fp32 [B, T, V], in host memory."""
        ...

    def sample(self, asked: SampleRequest) -> Generator[list[int | None]]:
        """Yield what `models.generate.sample_rows` does; closing it ends the work."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class InThisProcess:
    """A backend: the model is here, whole, or laid out over processes that all make the same calls."""

    def __init__(self, model: RankModel):
        self._model = model

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """See `Backend`."""
        found = self._model.logits(tokens_BT)
        if found is None or len(found) < len(tokens_BT):
            raise UserError("logits: under a launcher each process has some. Call it where none has set RANK.")
        return found.cpu()

    def sample(self, asked: SampleRequest) -> Generator[list[int | None]]:
        """See `Backend`."""
        return self._model.sample(asked, lambda: False)

    def close(self) -> None:
        """See `Backend`."""
        del self._model


class LoadedModel:
    """A trained model, its weights in memory, and its tokenizer. Use it in a `with` block, or `close` it."""

    def __init__(self, place: str | Path, plan: Plan, trust_code: bool = False, world: World | None = None):
        """See `load_model`. world: the processes that a launcher has started, as many as `plan` is for; all make the
        same calls. None: processes are started if the plan needs them."""
        source = open_together(place, trust_code, world)
        self.plan = plan
        #: The model's sizes.
        self.config: ModelConfig = source.run.model
        self.tokenizer = source.tokenizer
        #: Tokens that end a text.
        self.ends = ends_of_text(source)
        run_of_rows(source.run, plan)  # what is wrong is said before processes start
        self._backend: Backend
        if world is None and plan.world_size > 1:
            self._backend = InProcesses(source, plan, self.config.vocab_size)
        else:
            self._backend = InThisProcess(RankModel(source, plan, world or World(device=default_device())))

    def logits(self, tokens_BT: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Return the logits that follow each token of each row, fp32 [B, T, V] over the whole vocabulary, on the CPU.

        `tokens_BT`: token ids, int64 [B, T] or lists of one length. Each row is one document.
        Raises: UserError for ids that the model does not know, or rows that are empty or longer than its context.
        """
        try:
            tokens = torch.as_tensor(tokens_BT)
        except ValueError:
            raise UserError("logits: rows of several lengths. Give rows of one length, or one row at a time.") from None
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise UserError(
                f"logits: whole numbers [rows, tokens] are needed, not {list(tokens.shape)} {tokens.dtype}."
            )
        self._check_ids(tokens.min().item(), tokens.max().item(), "logits")
        if tokens.shape[1] > self.config.max_seq_len:
            raise UserError(
                f"logits: rows of {tokens.shape[1]} tokens, and model.max_seq_len is {self.config.max_seq_len}. "
                "Cut them."
            )
        return self._backend.logits(tokens.long().cpu())

    @overload
    def generate(self, prompts: str, **settings: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[str]: ...
    def generate(self, prompts: str | Sequence[Prompt], **settings: Any) -> str | list[str]:
        """Return the text that continues a prompt, or that of each of several.

        settings: those of `Sampling`: max_tokens, temperature, top_p, seed, stop. Raises: UserError, as `stream`.
        """
        sampling = sampling_of(settings)
        if isinstance(prompts, str):
            return next(self.complete([prompts], sampling)).text
        return [completion.text for completion in self.complete(prompts, sampling)]

    def complete(
        self, prompts: Sequence[Prompt], sampling: Sampling = USUAL, batch_size: int = BATCH_SIZE
    ) -> Iterator[Completion]:
        """Yield the texts that continue the prompts, in the prompts' order, as soon as they are whole; see `stream`."""
        found = [Completion(prompt, "", (), "") for prompt in prompts]
        told = 0
        for piece in self.stream(prompts, sampling, batch_size):
            so_far = found[piece.row]
            tokens = (*so_far.tokens, piece.token)
            found[piece.row] = replace(so_far, text=so_far.text + piece.text, tokens=tokens, finish=piece.finish)
            while told < len(found) and found[told].finish:
                yield found[told]
                told += 1

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = USUAL,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[TextPiece]:
        """Yield the texts that continue the prompts, piece by piece, as the model writes them.

        `batch_size` are written at once, those with the shortest prompts first. Row i is drawn with the seed
        sampling.seed + i, so that its text does not depend on the others. Closing the iterator ends the work.

        Raises: UserError, before anything is computed, for settings that make no sense, and for a prompt that is empty
        or leaves no room in the model's context.
        """
        sampling.check()
        if batch_size < 1:
            raise UserError(f"batch_size = {batch_size}: must be at least 1.")
        ids = [self.tokens_of(prompt) for prompt in prompts]
        for row, tokens in enumerate(ids):
            if len(tokens) >= self.config.max_seq_len:
                which = f"prompt {row + 1}" if len(ids) > 1 else "the prompt"
                raise UserError(
                    f"{which} has {len(tokens)} tokens and model.max_seq_len is {self.config.max_seq_len}. Shorten it."
                )
        by_length = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        batches = [by_length[first : first + batch_size] for first in range(0, len(ids), batch_size)]
        return (piece for rows in batches for piece in self._batch(rows, ids, sampling))

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; those of a text begin with the token that ends the document before.

        Raises: UserError for ids that the model does not know, or none.
        """
        if isinstance(prompt, str):
            return [self.tokenizer.eod_id, *self.tokenizer.encode(prompt)]
        if not prompt:
            raise UserError('a prompt without tokens: give at least one, or the text "" for a new document.')
        self._check_ids(min(prompt), max(prompt), "a prompt")
        return list(prompt)

    def close(self) -> None:
        """Free the model."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_ids(self, least: float, most: float, what: str) -> None:
        if least < 0 or most >= self.config.vocab_size:
            wrong = least if least < 0 else most
            raise UserError(f"{what}: token {wrong}, and the model knows those from 0 to {self.config.vocab_size - 1}.")

    def _batch(self, rows: Sequence[int], ids: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[TextPiece]:
        """Yield the pieces of some rows, which are written together."""
        limits = [min(sampling.max_tokens, self.config.max_seq_len - len(ids[row])) for row in rows]
        seeds = [sampling.seed + row for row in rows]
        prompts = [list(ids[row]) for row in rows]
        asked = SampleRequest(prompts, limits, seeds, sampling.temperature, sampling.top_p, sorted(self.ends))
        texts, left = [GrowingText(self.tokenizer, sampling.stop) for _ in rows], dict(enumerate(limits))
        with closing(self._backend.sample(asked)) as steps:
            for told in steps:
                for i, token in enumerate(told):
                    if token is None or i not in left:
                        continue
                    left[i] -= 1
                    is_end = token in self.ends
                    text = "" if is_end else texts[i].add(token)
                    finish: Finish = "stop" if is_end or texts[i].is_stopped else "" if left[i] else "length"
                    if finish:
                        text += texts[i].rest()
                        del left[i]
                    yield TextPiece(rows[i], text, token, finish)
                if not left:
                    return


def load_model(place: str | Path, plan: str | Plan = "", trust_code: bool = False) -> LoadedModel:
    """Load a model to use it.

    place: a run folder (its newest whole checkpoint), one checkpoint, or a Hugging Face folder or its URL. plan: how it
    is laid out and computes, such as "tp=2" or "precision=bf16"; by default on one device, in fp32. A plan for several
    devices starts a process for each, which end with this one. trust_code: approve and run code that the run brings
    along.

    Raises: UserError if there is no such model, the plan cannot lay it out, or its devices are not there.
    """
    return LoadedModel(place, plan_named(plan), trust_code)


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """Return settings as `Sampling`. Raises: UserError for one that there is not."""
    known = Sampling.__dataclass_fields__
    if unknown := sorted(settings.keys() - known.keys()):
        raise UserError(f"generate: no setting {unknown[0]!r}; there are {', '.join(known)}.")
    stop = settings.get("stop", ())
    return Sampling(**{**settings, "stop": (stop,) if isinstance(stop, str) else tuple(stop)})


def generate(
    path: str | Path,
    prompt: str = "",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    stop: Sequence[str] = (),
    plan: str | Plan = "",
    trust_code: bool = False,
) -> str:
    """Continue `prompt` with the model at `path`; see `load_model` and `Sampling` for the arguments.

    Raises: UserError, as these do.
    """
    settings = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop}
    sampling = sampling_of(settings)
    sampling.check()
    with load_model(path, plan, trust_code) as model:
        return next(model.complete([prompt], sampling)).text
