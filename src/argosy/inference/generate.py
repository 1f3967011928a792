"""Generate text with a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from argosy.errors import UserError
from argosy.inference.trained_model import open_checkpoint
from argosy.models.generate import sample_tokens


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
