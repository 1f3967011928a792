"""Sampling from a decoder, one token at a time for all rows of a batch, with a cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from argosy.models.decoder import Decoder

# N rows of a batch, B those that this rank has, T tokens, V vocabulary

NextTokens = Callable[[Tensor, Tensor], list[int]]
"""Reads the next tokens of all rows [N, T] (int64), which continue those that it has read, and returns the token that
follows in each row. [N] (fp64): the random number from [0, 1) that each row's token is drawn with."""

LEAST_TEMPERATURE = 1e-30
"""Logits over less than this may be no numbers of fp32."""


def sample_rows(
    next_tokens: NextTokens,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seeds: Sequence[int],
    stop: Collection[int],
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each row: None if its prompt is not read yet, or it has ended.

    A row ends with a token of `stop`, or after as many tokens as its limit. Rows begin together with the shortest
    prompt; longer ones are read on token by token, which is exact for every kind of layer and needs no padding. Each
    row has a seed: its random numbers do not depend on the rows beside it.
    """
    uniform_NL = uniform_numbers(seeds, max(limits))
    written, is_over = [0] * len(prompts), [limit < 1 for limit in limits]
    at = min(map(len, prompts))
    tokens_NT = torch.tensor([list(prompt[:at]) for prompt in prompts])
    while not all(is_over):
        drawn = [min(count, uniform_NL.shape[1] - 1) for count in written]
        found = next_tokens(tokens_NT, uniform_NL[range(len(prompts)), drawn])
        told: list[int | None] = [None] * len(prompts)
        for row, (prompt, token) in enumerate(zip(prompts, found, strict=True)):
            if at < len(prompt):
                found[row] = prompt[at]
            elif not is_over[row]:
                told[row] = token
                written[row] += 1
                is_over[row] = token in stop or written[row] == limits[row]
        yield told
        at += 1
        tokens_NT = torch.tensor(found)[:, None]


def uniform_numbers(seeds: Sequence[int], count: int) -> Tensor:
    """Return so many random numbers from [0, 1) for each seed, fp64 [seeds, count]."""
    generators = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([torch.rand(count, generator=generator, dtype=torch.float64) for generator in generators])


def choose(logits_BV: Tensor, temperature: float, top_p: float, uniform_B: Tensor) -> Tensor:
    """Return a token id for each row, int64 [B], drawn from the logits (fp32) with the row's random number.

    temperature 0, or below `LEAST_TEMPERATURE`, takes the likeliest token. top_p keeps the smallest set of likeliest
    tokens whose probabilities reach it (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature < LEAST_TEMPERATURE:
        return logits_BV.argmax(-1)
    probabilities, ids = (logits_BV / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    until = probabilities.cumsum(-1)
    kept = until - probabilities < top_p
    kept[:, 0] = True  # the likeliest token stays for any top_p
    reached = until.masked_fill(~kept, 0.0).amax(-1, keepdim=True)
    places = torch.searchsorted(until, uniform_B.to(until)[:, None] * reached, right=True)
    return ids.gather(-1, places.clamp(max=kept.sum(-1, keepdim=True) - 1)).squeeze(-1)


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
    """Yield up to `max_new_tokens` token ids that continue `prompt` (at least one id), ending before one in `stop`."""
    cache = model.new_cache(len(prompt) + max_new_tokens)

    def next_tokens(tokens_NT: Tensor, uniform_N: Tensor) -> list[int]:
        logits_NV = model(tokens_NT.to(model.device), cache=cache)[:, -1].float()
        return choose(logits_NV, temperature, top_p, uniform_N).tolist()

    for (token,) in sample_rows(next_tokens, [prompt], [max_new_tokens], [seed], stop):
        if token is None or token in stop:
            return
        yield token
