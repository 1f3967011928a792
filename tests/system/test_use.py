"""A trained model is used from the command line: texts of a file of prompts, under a plan, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Folder

LINES = ['"def train("', '{"prompt": "import", "id": 7}', '{"tokens": [0, 5, 6]}']


@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")  # few cores
def test_prompts_of_a_file_give_the_same_texts_under_a_plan(folder: Folder, trained: Path) -> None:
    (folder.path / "prompts.jsonl").write_text("\n".join(LINES))
    asked = ("generate", trained, "--prompts", "prompts.jsonl", "--json", "--max-tokens", 8, "--temperature", 0)
    alone = folder.argosy_here(*asked)
    found = [json.loads(line) for line in alone.splitlines() if line.startswith("{")]
    assert [(line["prompt"], line["tokens"], line["about"]) for line in found] == [
        ("def train(", None, {}),
        ("import", None, {"id": 7}),
        (None, [0, 5, 6], {}),
    ]
    assert all(line["text"] and line["finish"] in ("stop", "length") for line in found)
    together = folder.argosy_here(*asked, "--plan", "tp=2", "--batch-size", 2)
    assert [line for line in together.splitlines() if line.startswith("{")] == [
        line for line in alone.splitlines() if line.startswith("{")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--prompts", "none.jsonl"), ("none.jsonl", "No such file")),
        (("--prompts", "empty.jsonl"), ("empty.jsonl", "is empty")),
        (("--prompts", "wrong.jsonl"), ("wrong.jsonl:2", "no JSON")),
        (("--prompts", "keys.jsonl"), ("keys.jsonl:1", '"prompt" or "tokens"')),
        (("--prompts", "ids.jsonl"), ("ids.jsonl:1", "whole numbers")),
        (("--prompts", "empty.jsonl", "--prompt", "x"), ("--prompt and --prompts",)),
        (("--top-p", 0), ("--top-p 0.0", "above 0")),
        (("--stop", ""), ("--stop",)),
        (("--seed", -1), ("--seed -1",)),
        (("--batch-size", 0), ("--batch-size 0",)),
        (("--plan", "auto"), ("auto", "tp=2")),
        (("--plan", "tp=3"), ("tp=3", "model.heads = 4")),
        (("--plan", "precision=fp8"), ("fp8", "bf16")),
    ],
)
def test_what_makes_no_sense_is_refused(refused, folder: Folder, trained: Path, words, said) -> None:
    texts = {"empty": "\n", "wrong": '"a"\n{', "keys": '{"text": "a"}', "ids": '{"tokens": [1.5]}'}
    for name, text in texts.items():
        (folder.path / f"{name}.jsonl").write_text(text)
    refused("generate", trained, *words, said=said)
