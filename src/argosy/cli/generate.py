"""Continue a text with a trained model.

Examples:
  argosy generate runs/demo --prompt "def "
  argosy generate runs/demo/checkpoints/step-00000100 --temperature 0 --max-tokens 50
  argosy generate runs/demo --prompt "import os" --stop "\\n\\n"
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from argosy.cli.documents import write
from argosy.cli.options import must_be_folder, parse
from argosy.config.counts import WholeCount
from argosy.errors import UserError
from argosy.observe.terminal import printable, told_if_long


@dataclass(frozen=True)
class Options:
    """Options of `argosy generate`."""

    path: Annotated[Path, tyro.conf.Positional]
    """A run's folder (its newest checkpoint) or one checkpoint."""
    prompt: str = ""
    """The text to continue; without one, a new document."""
    max_tokens: WholeCount = 200
    """Largest number of tokens to generate."""
    temperature: float = 0.8
    """0 takes the most likely token each time; higher is more varied."""
    top_p: float = 0.95
    """Draw from the most likely tokens that together have this probability."""
    seed: int = 0
    """The same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Texts to stop before."""
    trust_code: bool = False
    """Approve and run code that the run brings along (extend.files); otherwise only code that you trained with."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class GeneratedText:
    """A text that a model continued."""

    prompt: str
    text: str
    """What the model added."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy generate", Options)
    _check(options)
    must_be_folder(options.path)
    with told_if_long("argosy generate: loading the model"):
        from argosy.inference.trained_model import stream

        pieces = stream(
            options.path,
            options.prompt,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
            trust_code=options.trust_code,
        )
        first = next(pieces, "")  # what is wrong with the input is said before anything is printed
    if options.json:
        with told_if_long("argosy generate: writing"):
            write("generate", GeneratedText(options.prompt, "".join([first, *pieces])))
        return
    print(printable(options.prompt + first), end="", flush=True)
    for piece in pieces:
        print(printable(piece), end="", flush=True)
    print()


def _check(options: Options) -> None:
    if options.temperature < 0:
        raise UserError(f"--temperature {options.temperature}: must be 0 or more. Try 0.8.")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p}: must be above 0 and at most 1. Try 0.95.")
    if options.max_tokens < 1:
        raise UserError(f"--max-tokens {options.max_tokens}: must be at least 1.")
