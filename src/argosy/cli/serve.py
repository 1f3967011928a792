"""Serve a trained model by OpenAI's API, to try it: /v1/models, /v1/completions, /v1/chat/completions.

One request is computed at a time; others wait. For load, export the model and serve it by vLLM. Only this machine can
ask unless --host says otherwise; then the API key that is printed is needed. ARGOSY_SERVE_TOKEN gives one of your own.

Examples:
  argosy serve runs/sft
  argosy serve runs/sft --port 8000 --name my-model
  argosy serve hf://Qwen/Qwen3-0.6B --plan precision=bf16
  argosy serve runs/sft --host 0.0.0.0            for others on the network, with an API key
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.cli.documents import write
from argosy.cli.options import HostAddress, ModelPath, ModelPlan, TrustCode, must_be_folder, parse
from argosy.data.stores.store import spelled
from argosy.errors import UserError, imported
from argosy.observe.terminal import printable, told_if_long

if TYPE_CHECKING:
    from argosy.inference.loaded_model import ChatModel, LoadedModel

SERVE_TOKEN_VARIABLE = "ARGOSY_SERVE_TOKEN"
"""Variable of the environment with an API key of the user's own; then 127.0.0.1 asks for it as well."""


@dataclass(frozen=True)
class Options:
    path: ModelPath
    host: HostAddress = "127.0.0.1"
    port: int | None = None
    """Port to listen at; 8000 or the next free one if not given."""
    name: str = ""
    """The model's name in requests; by default that of its folder."""
    template: str = ""
    """Chat template: a jinja file, or chatml; by default the one that comes with the model."""
    plan: ModelPlan = ""
    trust_code: TrustCode = False
    json: bool = False
    """Print as JSON where the model answers."""


@dataclass(frozen=True)
class ServedModel:
    """A model that answers, and where."""

    model: str
    """Its name in requests."""
    url: str
    """The base_url of OpenAI's clients."""
    api_key: str | None
    """None if nobody is asked for one."""
    without_conversations: str | None
    """Why conversations are refused; None if they are answered."""


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy serve", Options)
    for module in ("starlette", "uvicorn"):
        imported(module, "serve", "argosy serve")
    from argosy.config.launch import is_loopback
    from argosy.watch.http import listening, new_token, token_of, url

    must_be_folder(options.path, or_url=True)
    token = token_of(SERVE_TOKEN_VARIABLE) or ("" if is_loopback(options.host) else new_token())
    name = options.name or spelled(options.path).rstrip("/").rpartition("/")[2]
    with told_if_long("argosy serve: loading the model"):
        from argosy.inference.loaded_model import load_model
        from argosy.inference.openai_server import SERVE_PORT, server_of

        listening(options.host, options.port, SERVE_PORT).close()  # what is wrong with them is told before a long load
        model = load_model(options.path, options.plan, options.trust_code)
    with model, listening(options.host, options.port, SERVE_PORT) as listener:
        chat, why_not = _chat_of(model, options.template)
        address = f"{url(listener, options.host, '')}v1"
        if options.json:
            write("serve", ServedModel(name, address, token or None, why_not or None))
        else:
            print(f"{options.path} answers as {name!r} at {address}   (Ctrl-C ends)")
            print(f"API key: {token}\n" if token else "", end="")
            print(printable(f"conversations are refused: {why_not}\n") if why_not else "", end="")
            print(
                "It is for trying a model: one request at a time. For load, export it and serve it by vLLM.", flush=True
            )
        with suppress(KeyboardInterrupt):  # the server has ended by itself
            server_of(model, name, chat, token, options.host).run(sockets=[listener])
    return 0


def _chat_of(model: LoadedModel, template: str) -> tuple[ChatModel | None, str]:
    """Return the model with its chat template; without one, None and what is missing. Raises: UserError if it was
    named."""
    from argosy.inference.loaded_model import ChatModel

    try:
        return ChatModel(model, template), ""
    except UserError as problem:
        if template:
            raise
        return None, str(problem)
