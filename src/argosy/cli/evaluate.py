"""Measure a trained model on held-out text: loss, perplexity, bits per byte.

Examples:
  argosy evaluate runs/demo                                 on the held-out part of its own data
  argosy evaluate runs/demo --data data/mine --split train  on other text, prepared with its tokenizer
  argosy evaluate runs/demo --plan tp=2                     laid out over two devices
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from argosy.cli.documents import write
from argosy.cli.options import must_be_folder, parse
from argosy.config.counts import WholeCount
from argosy.data.stores.store import is_url
from argosy.errors import UserError
from argosy.inference.plans import plan_named
from argosy.observe.terminal import told_if_long


@dataclass(frozen=True)
class Options:
    """Options of `argosy evaluate`."""

    path: Annotated[str, tyro.conf.Positional]
    """A run's folder (its newest checkpoint), one checkpoint, or a Hugging Face folder or its URL."""
    data: Path | None = None
    """A folder that `argosy prepare` wrote; the run's own data if not given."""
    split: Literal["train", "validation"] = "validation"
    """Split of the data."""
    max_tokens: WholeCount = 1_000_000
    """Largest number of tokens to read."""
    seq_len: WholeCount | None = None
    """Tokens per window; data.seq_len of the run if not given."""
    plan: str = ""
    """Plan by which the model is laid out and computes, such as "tp=2" or "precision=bf16"; empty: one device, fp32."""
    trust_code: bool = False
    """Approve and run code that the run brings along (extend.files); otherwise only code that you trained with."""
    json: bool = False
    """Print the result as JSON."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy evaluate", Options)
    if options.max_tokens < 1 or (options.seq_len or 1) < 1:
        raise UserError("--max-tokens and --seq-len must be at least 1.")
    plan = plan_named(options.plan)
    if not is_url(options.path):
        must_be_folder(Path(options.path))
    with told_if_long("argosy evaluate: reading the text and the model, and computing the loss"):
        from argosy.inference.evaluate import evaluate
        from argosy.inference.members import launched_world

        with launched_world(plan) as world:
            score = evaluate(
                options.path,
                options.data,
                split=options.split,
                max_tokens=options.max_tokens,
                seq_len=options.seq_len,
                plan=plan,
                trust_code=options.trust_code,
                world=world,
            )
    if world is not None and not world.is_first:
        return
    if options.json:
        write("evaluate", score)
        return
    print(
        f"loss {score.loss:.4f} nats per token   perplexity {score.perplexity:.2f}   "
        f"{score.bits_per_byte:.4f} bits per byte   ({score.tokens} tokens)"
    )
