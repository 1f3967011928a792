"""Talk with a trained model in the terminal, through its chat template.

Ctrl-C stops an answer. /reset begins a new conversation, /exit or Ctrl-D ends. If the input is no terminal, each line
is a message, and only the answers are printed.

Examples:
  argosy chat runs/sft
  argosy chat runs/sft --system "Answer in one line." --temperature 0.2
  argosy chat hf://Qwen/Qwen3-0.6B --plan precision=bf16
  argosy chat runs/demo --template chatml           a model whose tokenizer has no template
  echo "What is 7 + 5?" | argosy chat runs/sft --temperature 0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from argosy.cli.documents import write
from argosy.cli.options import ModelPath, ModelPlan, Temperature, TopP, TrustCode, must_be_folder, parse
from argosy.config.section import WholeCount
from argosy.errors import UserError
from argosy.inference.sampling import Finish, Sampling
from argosy.observe.terminal import printable, told_if_long

if TYPE_CHECKING:
    from argosy.inference.loaded_model import ChatModel

YOU_PROMPT, MODEL_PROMPT = "you> ", "model> "
RESET, EXIT = "/reset", "/exit"


@dataclass(frozen=True)
class Options:
    path: ModelPath
    system: str = ""
    """The message that says how the model is to answer, if its template has a place for one."""
    template: str = ""
    """A jinja file, or chatml; by default the template that comes with the model."""
    max_tokens: WholeCount = 1000
    """Largest number of tokens of an answer."""
    temperature: Temperature = 0.8
    top_p: TopP = 0.95
    seed: int = 0
    """The same seed and the same messages give the same answers."""
    plan: ModelPlan = ""
    trust_code: TrustCode = False
    json: bool = False
    """Print {"message", "answer", "finish"} as JSON, on one line for each message."""


@dataclass(frozen=True)
class AnsweredMessage:
    """A message of a conversation, with the answer."""

    message: str
    answer: str
    finish: Finish
    """stop: the answer's turn ended; length: no more tokens were allowed."""


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy chat", Options)
    sampling = Sampling(options.max_tokens, options.temperature, options.top_p, options.seed)
    sampling.check(lambda key: f"--{key.replace('_', '-')}")
    must_be_folder(options.path, or_url=True)
    with told_if_long("argosy chat: loading the model"):
        from argosy.inference.loaded_model import ChatModel, load_model

        model = load_model(options.path, options.plan, options.trust_code)
    with model:
        is_terminal = sys.stdin.isatty() and not options.json
        ChatSession(ChatModel(model, options.template), options.system, sampling, is_terminal, options.json).run()
    return 0


class ChatSession:
    """A conversation at the terminal, or of lines that come in."""

    def __init__(self, chat: ChatModel, system: str, sampling: Sampling, is_terminal: bool, is_json: bool = False):
        self._chat, self._sampling, self._is_terminal, self._is_json = chat, sampling, is_terminal, is_json
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)
        """All that was said."""

    def run(self) -> None:
        """Answer messages until there are no more."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # so that lines can be edited, and come again with the up key
            print(f"Ctrl-C stops an answer; {RESET} begins anew; {EXIT} ends.")
        for line in self._lines():
            if line == RESET:
                self.messages = list(self._start)
                self._say("a new conversation")
            elif line.startswith("/") and self._is_terminal:
                self._say(f"{line.split()[0]}: there are {RESET} and {EXIT}")
            else:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = (input(YOU_PROMPT) if self._is_terminal else input()).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print(f"\n({EXIT} ends)")
                continue
            if line == EXIT:
                return
            if line:
                yield line

    def _answer(self, line: str) -> None:
        """Print the answer to a message as it is written. What is wrong with the message is said, and it is dropped."""
        messages = [*self.messages, {"role": "user", "content": line}]
        sampling = replace(self._sampling, seed=self._sampling.seed + len(messages))
        try:
            pieces = self._chat.stream([self._chat.prompt_of(messages)], sampling)
        except UserError as problem:
            if not self._is_terminal:
                raise
            print(f"{problem} {RESET} begins a new conversation.")
            return
        said = ""
        finish: Finish = ""
        print(MODEL_PROMPT if self._is_terminal else "", end="", flush=True)
        try:
            for piece in pieces:
                said, finish = said + piece.text, piece.finish
                print("" if self._is_json else printable(piece.text), end="", flush=True)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            print(" (stopped)", end="")
        finally:
            pieces.close()
        if self._is_json:
            write("chat", AnsweredMessage(line, said, finish))
        else:
            print(flush=True)
        # An answer that is empty is none to a template; the conversation goes on without the message.
        self.messages = [*messages, {"role": "assistant", "content": said}] if said.strip() else self.messages

    def _say(self, text: str) -> None:
        if self._is_terminal:
            print(f"({printable(text)})")
