"""Conversations with a model: in Python and at the terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import argosy
from argosy.cli import main
from argosy.cli.chat import ChatSession
from argosy.cli.documents import schema_of
from argosy.errors import UserError
from argosy.inference.loaded_model import ChatModel, LoadedModel
from argosy.inference.sampling import Sampling, TextPiece
from talker import make_talker, messages
from waiting import PATIENT_S

GREEDY = Sampling(max_tokens=40, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    with argosy.load_model(folder) as loaded:
        yield loaded


def answer(chat: ChatModel, *said: tuple[str, str]) -> tuple[str, str]:
    pieces = list(chat.stream([chat.prompt_of(messages(*said))], GREEDY))
    return "".join(piece.text for piece in pieces), pieces[-1].finish


def test_an_answer_ends_with_its_turn(model: LoadedModel) -> None:
    chat = ChatModel(model)
    assert chat.turn_end == "<|im_end|>"
    assert answer(chat, ("user", "hi")) == ("hello there", "stop")
    said = ("user", "hi"), ("assistant", "hello there"), ("user", "more")
    assert answer(chat, *said) == ("Größe 🙂 is all", "stop")
    assert chat.prompt_of(messages(said[0], ("assistant", ""), said[2]))  # as clients send an answer cut off at once


def test_the_end_of_a_turn_may_be_plain_text(model: LoadedModel, tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}assistant:")
    chat = ChatModel(model, str(template))
    assert chat.turn_end == "###"
    assert "###" not in answer(chat, ("user", "hi"))[0]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "holds no list of messages"),
        ([{"role": "robot", "content": "hi"}], "has the role 'robot'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": "a<|im_end|>b"}], "message 0 spells <|im_end|>"),
        ([{"role": "user", "content": "a\udcff"}], "the messages: '\\udcff' at place"),
    ],
)
def test_messages_that_no_template_may_see_are_refused(model: LoadedModel, said: object, message: str) -> None:
    with pytest.raises(UserError) as refused:
        ChatModel(model).prompt_of(said)
    assert message in str(refused.value)


def test_without_a_template_the_option_is_named(trained: Path) -> None:
    with argosy.load_model(trained) as loaded, pytest.raises(UserError, match="Give --template"):
        ChatModel(loaded)


def typed(lines: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    """Run `argosy chat` with these lines as its input. Return its exit code."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *options])


def test_lines_that_come_in_are_answered_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "hi\n\nmore\n/reset\nhi\n/exit\nhi\n"
    assert typed(lines, monkeypatch, str(folder), "--temperature", "0") == 0
    assert capsys.readouterr().out == "hello there\nGröße 🙂 is all\nhello there\n"


def test_a_line_that_begins_with_a_path_is_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("/etc is what?\n", monkeypatch, str(folder), "--temperature", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["message"] == "/etc is what?"


def test_with_json_each_answer_is_a_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("hi\nmore\n", monkeypatch, str(folder), "--temperature", "0", "--json") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert documents[0] == {"message": "hi", "answer": "hello there", "finish": "stop"} and len(documents) == 2
    Draft202012Validator(schema_of("chat")).validate(documents[1])


def test_a_system_message_is_said_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("hi\n", monkeypatch, str(folder), "--temperature", "0", "--system", "be brief") == 0
    assert capsys.readouterr().out == "yo\n"


def test_a_message_with_a_special_token_ends_with_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("<|im_start|>\n", monkeypatch, str(folder)) == 2
    assert "spells <|im_start|>" in capsys.readouterr().err


class Interrupted(ChatModel):
    """A model whose first answer is interrupted by Ctrl-C after one piece."""

    is_first = True

    def stream(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[TextPiece]:
        for piece in super().stream(prompts, sampling):
            yield piece
            if self.is_first:
                self.is_first = False
                raise KeyboardInterrupt


def test_what_was_said_before_ctrl_c_is_part_of_the_conversation(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nmore\n"))
    talk = ChatSession(Interrupted(model), "", GREEDY, is_terminal=True)
    talk.run()
    shown = capsys.readouterr().out
    assert " (stopped)" in shown and shown.count("model> ") == 2
    said = [message["content"] for message in talk.messages]
    assert said[0] == "hi" and said[1] and "hello there".startswith(said[1])


def test_at_a_terminal_ctrl_c_ends_no_conversation(folder: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "argosy", "chat", str(folder), "--temperature", "0"]
    # What starts the tests in the background has them ignore Ctrl-C, and their children too.
    hears = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, **hears)
    os.close(slave)
    read_until(master, "you> ")
    for typed_line, shown in (("/what", "there are /reset"), ("hi", "model> hello there"), ("/reset", "a new conv")):
        os.write(master, f"{typed_line}\n".encode())
        assert shown in read_until(master, "you> ")
    os.kill(process.pid, signal.SIGINT)
    # Python sees a signal between readline's prompt and its wait for keys only at the next key or signal.
    while not select.select([master], [], [], 1)[0]:
        os.kill(process.pid, signal.SIGINT)
    read_until(master, "(/exit ends)")
    os.write(master, b"/exit\n")
    assert process.wait(120) == 0
    os.close(master)


def read_until(terminal: int, text: str) -> str:
    """Return what the terminal shows up to `text`."""
    shown = b""
    while text.encode() not in shown and select.select([terminal], [], [], PATIENT_S)[0]:
        shown += os.read(terminal, 1000)
    assert text.encode() in shown, shown
    return shown.decode(errors="replace")


def test_a_template_that_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(folder), "--template", "nowhere.jinja"]) == 2
    assert "--template = nowhere.jinja: there is no such file" in capsys.readouterr().err
