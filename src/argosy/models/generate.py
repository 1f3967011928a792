"""Sampling from a decoder, one token at a time, with a key/value cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from argosy.errors import UserError
from argosy.models.decoder import Decoder


@torch.no_grad()
def sample_tokens(
    model: Decoder,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Yield up to `max_new_tokens` token ids that continue `prompt` (at least one id), ending before one in `stop`.

    temperature 0 takes the likeliest token. top_p keeps the smallest set of likeliest tokens whose probabilities
    reach it (nucleus sampling, Holtzman et al. 2020).
    """
    if model.score is not None:
        raise UserError(
            "this is a reward model: it ends with a score, and not with words. `argosy evaluate` scores pairs."
        )
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    cache = model.new_cache(1, len(prompt) + max_new_tokens)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(max_new_tokens):
        with torch.compiler.set_stance("force_eager"):  # compiling is not worth it for one token at a time
            logits_V = model(tokens, cache=cache)[0, -1].float()
        token = choose(logits_V, temperature, top_p, generator)
        if token in stop:
            return
        yield token
        tokens = torch.tensor([[token]], device=device)


def choose(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw one token id from the logits."""
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities, ids = (logits_V / temperature).softmax(-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    before[0] = -1.0  # the likeliest token stays for any top_p
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
