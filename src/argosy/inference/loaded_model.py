"""A model that is loaded to be used, whatever it is laid out over: logits, texts as they are written, and
conversations, whose messages become a prompt through the model's template."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, Self, overload

import torch
from torch import Tensor

from argosy.data.chat_encoder import check_spelling
from argosy.data.chat_template import ChatTemplate
from argosy.data.conversations import BadRecord, Message, messages_of
from argosy.data.manifest import TOKENIZER
from argosy.data.stores.store import is_url
from argosy.data.tokenizer import tokenizer_of, usage_of
from argosy.errors import UserError
from argosy.inference.members import InProcesses, open_together
from argosy.inference.plans import plan_named, run_of_rows
from argosy.inference.rank_model import RankModel, SampleRequest
from argosy.inference.sampling import Prompt, Sampling, TextPiece
from argosy.inference.trained_model import default_device
from argosy.inference.writing import TextWriter, check_text
from argosy.parallel.world import World
from argosy.plan.plan import Plan


class Backend(Protocol):
    """The place where a model computes."""

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of all rows, fp32 [B, T, V], in host memory."""
        ...

    def sample(self, request: SampleRequest) -> Generator[list[int | None]]:
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
        found = self._model.logits(tokens_BT)
        if found is None or len(found) < len(tokens_BT):
            raise UserError("logits: under a launcher (RANK is set) each process has only a part. Call it without one.")
        return found.cpu()

    def sample(self, request: SampleRequest) -> Generator[list[int | None]]:
        return self._model.sample(request, lambda: False)

    def close(self) -> None:
        del self._model


class LoadedModel(TextWriter):
    """A trained model, its weights in memory, and its tokenizer. Use it in a `with` block, or `close` it."""

    def __init__(self, place: str | Path, plan: Plan, trust_code: bool = False, world: World | None = None):
        """See `load_model`. world: the processes that a launcher has started, as many as `plan` is for; all make the
        same calls. None: processes are started if the plan needs them."""
        source = open_together(place, trust_code, world)
        if source.run.model.score:
            raise UserError(f"{place} is a reward model: it gives scores, no text. Use it with argosy evaluate.")
        self.plan = plan
        run_of_rows(source.run, plan)  # what is wrong is said before processes start
        self._backend: Backend
        if world is None and plan.world_size > 1:
            self._backend = InProcesses(source, plan, source.run.model.vocab_size)
        else:
            self._backend = InThisProcess(RankModel(source, plan, world or World(device=default_device())))
        super().__init__(source, self._backend.sample)

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
        self.check_ids(tokens.min().item(), tokens.max().item(), "logits")
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

    def close(self) -> None:
        """Free the model."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


TEMPLATE_OPTION = "--template"
"""The option that gives a template."""


class ChatModel:
    """A loaded model with its chat template. It ends texts at the end of a turn too."""

    def __init__(self, model: LoadedModel, template: str = ""):
        """template: a jinja file, or the name of a built-in one; empty: the model's own.

        Raises: UserError if there is none, or it refuses a plain conversation.
        """
        self.model = model
        self.template = _template_of(model, template)
        self._special = model.tokenizer.special_tokens
        try:
            #: The text that ends an answer; empty if the template puts nothing after one.
            self.turn_end = self.template.turn_end(self._special)
        except BadRecord as problem:
            raise UserError(f"{model.home}: its chat template refuses a conversation: {problem.detail}") from None
        self._stop: tuple[str, ...] = (self.turn_end,) if self.turn_end else ()
        tokens = model.tokenizer.encode_template(self.turn_end)
        if len(tokens) == 1 and tokens[0] in self._special.values():  # decoded text does not show it
            model.ends |= {tokens[0]}
            self._stop = ()

    def prompt_of(self, messages: Any) -> list[int]:
        """Return the tokens of a conversation up to the answer that is to be written.

        messages: as JSON has them: a list of {"role", "content"}. Raises: UserError.
        """
        try:
            read: list[Message] = messages_of(messages, "messages", may_say_nothing=True)
            check_spelling(read, self._special)
            text = self.template.render(read, opens_answer=True)
        except BadRecord as problem:
            raise UserError(f"{problem.detail}. Send other messages.") from None
        check_text(text, "the messages")
        return self.model.tokenizer.encode_template(text)

    def stream(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[TextPiece]:
        """Yield the answers to prompts of `prompt_of` as they are written; see `LoadedModel.stream`."""
        return self.model.stream(prompts, replace(sampling, stop=(*sampling.stop, *self._stop)), are_answers=True)


def _template_of(model: LoadedModel, given: str) -> ChatTemplate:
    if not is_url(model.home):
        return ChatTemplate.load(Path(model.home), given, TEMPLATE_OPTION)
    with TemporaryDirectory() as scratch:
        for name, data in usage_of(model.home).items():
            (Path(scratch) / name).write_bytes(data)
        (Path(scratch) / TOKENIZER).write_bytes(tokenizer_of(model.home) or b"")
        return ChatTemplate.load(Path(scratch), given, TEMPLATE_OPTION)
