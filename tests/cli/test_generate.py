"""The file of prompts of `argosy generate`: what a line may be, and which line is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy import cli
from argosy.cli.generate import prompt_of, read_prompts
from argosy.errors import UserError


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(text: str | bytes) -> Path:
        (tmp_path / "prompts.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
        return tmp_path / "prompts.jsonl"

    return write


@pytest.mark.parametrize(
    ("line", "said", "prompt"),
    [
        ('"def "', {"prompt": "def "}, "def "),
        ('{"prompt": ""}', {"prompt": ""}, ""),
        ('{"id": 7, "prompt": "a", "tags": ["x"]}', {"id": 7, "prompt": "a", "tags": ["x"]}, "a"),
        ('{"tokens": [0, 5, 6]}', {"tokens": [0, 5, 6]}, [0, 5, 6]),
        ('  "spaces around"\t\r', {"prompt": "spaces around"}, "spaces around"),
    ],
)
def test_a_line_is_a_text_or_has_a_prompt_or_tokens(written, line, said, prompt):
    (found,) = read_prompts(written(line))
    assert (found, prompt_of(found)) == (said, prompt)


def test_empty_lines_are_passed_over_and_breaks_of_other_kinds_are_text(written):
    texts = ["one\u2028two", "three\x85four", "five\x0bsix\x0cseven"]
    lines = [json.dumps(texts[0], ensure_ascii=False), "", f'"{texts[1]}"', "  ", json.dumps(texts[2])]
    assert [prompt_of(each) for each in read_prompts(written("\n".join(lines)))] == texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"a"\n{', ":2: no JSON (Expecting property name enclosed in double quotes"),
        ("[" * 100_000, ":1: no JSON (it is nested too deep"),
        ("3", ':1: a line is a text in quotes, or has "prompt" or "tokens". Write {"prompt": TEXT}.'),
        ('{"text": "a"}', ':1: a line is a text in quotes, or has "prompt" or "tokens"'),
        ('{"prompt": "a", "tokens": [1]}', ':1: a line is a text in quotes, or has "prompt" or "tokens"'),
        ('\n{"prompt": ["a"]}', ':2: prompt = ["a"]: it is no text. Put it in quotes.'),
        ('{"tokens": []}', ":1: tokens = []: a list of whole numbers is needed."),
        ('{"tokens": [1, true]}', ":1: tokens = [1, true]: a list of whole numbers is needed."),
        ('{"tokens": "12"}', ':1: tokens = "12": a list of whole numbers is needed.'),
        (" \n\n", ': it is empty. Write a prompt on each line, such as {"prompt": "def "}.'),
        (b"\xff\xfe", ": cannot be read: it is no text in UTF-8. Name a file of JSON lines."),
    ],
)
def test_a_wrong_line_is_named_with_what_it_says_and_what_to_write(written, text, message):
    file = written(text)
    with pytest.raises(UserError) as refused:
        read_prompts(file)
    assert f"{file}{message}" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read: No such file or directory\. Name a file"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size 0: must be at least 1."),
        (["--prompt", "a", "--prompts", "b.jsonl"], "--prompt and --prompts: give one of them."),
        (["--max-tokens", "0"], "--max-tokens 0: must be at least 1."),
        (["--temperature", "-1"], "--temperature -1.0: must be 0 or more. Try 0.8."),
        (["--stop", ""], '--stop "": every text has the empty one in it. Leave it out, or name a text.'),
    ],
)
def test_options_are_refused_before_the_model_is_looked_for(words, message, capsys):
    assert cli.main(["generate", "nowhere", *words]) == 2
    assert capsys.readouterr().err == f"argosy: {message}\n"
