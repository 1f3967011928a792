"""Continue texts with a trained model.

Examples:
  argosy generate runs/demo --prompt "def "
  argosy generate runs/demo/checkpoints/step-00000100 --temperature 0 --max-tokens 50
  argosy generate runs/demo --prompt "import os" --stop $'\\n\\n'
  argosy generate runs/demo --prompts prompts.jsonl --json > texts.jsonl   {"prompt": "..."} on each line
  argosy generate hf://Qwen/Qwen3-8B --plan tp=2,precision=bf16,weights=bf16 --prompt "Once"
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argosy.cli.documents import write
from argosy.cli.options import ModelPath, ModelPlan, Temperature, TopP, TrustCode, must_be_folder, parse
from argosy.config.section import WholeCount
from argosy.errors import UserError
from argosy.files import json_of, read_at_most
from argosy.inference.plans import plan_named
from argosy.inference.sampling import Prompt, Sampling
from argosy.observe.terminal import printable, told_if_long

if TYPE_CHECKING:
    from argosy.inference.loaded_model import LoadedModel

MOST_PROMPT_BYTES = 2**30


@dataclass(frozen=True)
class Options:
    path: ModelPath
    prompt: str = ""
    """The text to continue; without one, a new document."""
    prompts: Path | None = None
    """A file of prompts, one JSON value a line: a text, {"prompt": TEXT}, or {"tokens": [IDS]}; with --json its other
    keys come out again, under "about"."""
    max_tokens: WholeCount = 200
    """Largest number of tokens to generate."""
    temperature: Temperature = 0.8
    top_p: TopP = 0.95
    seed: int = 0
    """The same seed gives the same text; prompt i of a file gets the seed plus i."""
    stop: tuple[str, ...] = ()
    """Texts to stop before."""
    batch_size: WholeCount = 16
    """Prompts of a file that are continued at once."""
    plan: ModelPlan = ""
    trust_code: TrustCode = False
    json: bool = False
    """Print JSON, a prompt a line."""


@dataclass(frozen=True)
class GeneratedText:
    """A prompt and its continuation."""

    prompt: str | None
    """The text; null if the prompt was given in tokens."""
    tokens: list[int] | None
    """Its tokens, if it was given so."""
    text: str
    """The continuation alone."""
    finish: str
    """Why it ends: stop or length."""
    about: dict[str, Any]
    """The other keys of the prompt's line in the file of prompts, such as an id."""


def main(argv: list[str]) -> None:
    options = parse(argv, "argosy generate", Options)
    sampling = Sampling(options.max_tokens, options.temperature, options.top_p, options.seed, options.stop)
    sampling.check(lambda key: f"--{key.replace('_', '-')}")
    if options.batch_size < 1:
        raise UserError(f"--batch-size {options.batch_size}: must be at least 1.")
    if options.prompts is not None and options.prompt:
        raise UserError("--prompt and --prompts: give one of them.")
    plan = plan_named(options.plan)
    must_be_folder(options.path, or_url=True)
    asked = [{"prompt": options.prompt}] if options.prompts is None else read_prompts(options.prompts)
    with ExitStack() as held:
        with told_if_long("argosy generate: loading the model"):
            from argosy.inference.loaded_model import LoadedModel
            from argosy.inference.members import launched_world

            world = held.enter_context(launched_world(plan))
            model = held.enter_context(LoadedModel(options.path, plan, options.trust_code, world))
        if world is not None and not world.is_first:  # it computes with the first, which prints
            deque(model.stream([prompt_of(said) for said in asked], sampling, options.batch_size), maxlen=0)
        elif options.prompts is None and not options.json:
            _write(model, options.prompt, sampling)
        else:
            with told_if_long("argosy generate: writing"):
                _write_all(model, asked, sampling, options)


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of prompts, each with its "prompt" or "tokens".

    Raises: UserError that names the line.
    """
    try:
        lines = read_at_most(file, MOST_PROMPT_BYTES).decode().split("\n")  # a text may have other breaks in it
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or "it is no text in UTF-8"
        raise UserError(f"--prompts {file}: cannot be read: {why}. Name a file of JSON lines.") from None
    found = [_prompt_of(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UserError(f'--prompts {file}: it is empty. Write a prompt on each line, such as {{"prompt": "def "}}.')
    return found


def _prompt_of(line: str, where: str) -> dict[str, Any]:
    try:
        said = json_of(line)
    except ValueError as problem:
        raise UserError(f'{where}: no JSON ({problem}). Write a text in quotes, or {{"prompt": TEXT}}.') from None
    said = {"prompt": said} if isinstance(said, str) else said
    if not isinstance(said, dict) or len(said.keys() & {"prompt", "tokens"}) != 1:
        raise UserError(f'{where}: a line is a text in quotes, or has "prompt" or "tokens". Write {{"prompt": TEXT}}.')
    ids = said.get("tokens")
    if "prompt" in said and not isinstance(said["prompt"], str):
        raise UserError(f"{where}: prompt = {json.dumps(said['prompt'])[:50]}: it is no text. Put it in quotes.")
    if "tokens" in said and not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise UserError(f"{where}: tokens = {json.dumps(ids)[:50]}: a list of whole numbers is needed.")
    return said


def prompt_of(said: dict[str, Any]) -> Prompt:
    """Return the prompt of a line of the file."""
    prompt: Prompt = said["prompt"] if "prompt" in said else said["tokens"]
    return prompt


def _write(model: LoadedModel, prompt: str, sampling: Sampling) -> None:
    """Print a prompt, and its continuation as it grows."""
    pieces = model.stream([prompt], sampling)
    first = next(pieces)  # what is wrong with the input is said before anything is printed
    print(printable(prompt + first.text), end="", flush=True)
    for piece in pieces:
        print(printable(piece.text), end="", flush=True)
    print()


def _write_all(model: LoadedModel, asked: list[dict[str, Any]], sampling: Sampling, options: Options) -> None:
    """Print the prompts with their continuations in their order, each as soon as those before it are written."""
    prompts = [prompt_of(said) for said in asked]
    for said, completion in zip(asked, model.complete(prompts, sampling, options.batch_size), strict=True):
        if options.json:
            prompt, tokens = said.get("prompt"), said.get("tokens")
            about = {key: value for key, value in said.items() if key not in ("prompt", "tokens")}
            write("generate", GeneratedText(prompt, tokens, completion.text, completion.finish, about))
        else:
            print(printable(f"{said.get('prompt', '')}{completion.text}\n"), flush=True)
