"""Every command with --json prints documents of a known kind and nothing else, and each has a schema that they keep."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tests.cli.test_design_command import SPACE
from tests.cli.test_frame import run_python
from tests.plan.report.test_jobs import SMALL

from argosy.cli import COMMANDS, main
from argosy.cli.documents import DOCUMENTS, schema_of, write
from argosy.training.evaluation import Score
from commands import RUN_FILE
from tasks import CHOICES, task_file

SMALL_PLAN = "plan --model qwen3-0.6b --cluster 8xh100 --seq-len 2048 --global-batch 64 --top 2"
CALLS = {
    "error": "status nowhere",
    "runs": "runs {run}",
    "status": "status {run}",
    "compare": "compare {run} {run}",
    "metrics": "metrics {run} --columns all --every 5",
    "metrics-keys": "metrics {run}",
    "metrics-out": "metrics {run} --columns loss --out {tmp}/metrics.csv --format csv",
    "logs": "logs {run}",
    "prepare": "prepare {corpus}/manifest.json --out {tmp}/data --vocab-size 300 --processes 1",
    "checkpoint-list": "checkpoint list {run}",
    "checkpoint-list-adapters": "checkpoint list {runs}",
    "checkpoint-verify": "checkpoint verify {run}",
    "checkpoint-prune": "checkpoint prune {copy}",
    "checkpoint-export": "checkpoint export {run} --out {tmp}/exported",
    "checkpoint-import": "checkpoint import {hf} --out {tmp}/imported",
    "generate": "generate {run} --prompt def --max-tokens 4",
    "evaluate": "evaluate {run} --max-tokens 500",
    "evaluate-tasks": "evaluate {run} --tasks {task} --seq-len 64",
    "plan": SMALL_PLAN,
    "plan-clusters": f"{SMALL_PLAN} --cluster 8xa100",
    "plan-within": "plan --model qwen3-0.6b --cluster h100 --tokens 1B --within 30d --top 2 --fix tp=1,cp=1",
    "plan-serve": "plan --model qwen3-0.6b --cluster 1xh100 --serve --prompt-len 512 --output-len 128",
    "plan-jobs": "plan --jobs {jobs}",
    "design": "design {space}",
    "scaling": "scaling {results} --budget 1e21 --parameters 7e9 --tokens 140e9 --draws 3",
    "simulate": "simulate parity --plan dp_shard=2 --model.layers 1 --train.global-batch 2",
    "simulate-cuda": "simulate parity --plan dp_shard=2 --device cuda --model.layers 1 --train.global-batch 2",
    "docs": "docs skill",
    "docs-topics": "docs",
    "config-show": "config show",
    "config-schema": "config schema --of dry-run",
    "config-presets": "config presets",
    "config-device": "config device mine --bf16-tflops 200 --memory-gb 32 --memory-gb-s 1000 --out {tmp}/mine.toml",
}
"""Document -> a call that prints it. Those that need processes of their own: tests/system/test_json.py."""
DRY = (
    "train {run_file} --run-dir {tmp}/new",
    "launch {run_file} --run-dir {tmp}/new",
    "prepare {corpus}/manifest.json --out {tmp}/dry",
    "sweep {sweep} --sweep-dir {tmp}/sweep",
    "chaos {run_file} --folder {tmp}/chaos",
    "checkpoint prune {copy} --keep-last 1",
    "checkpoint export {run} --out {tmp}/dry",
    "checkpoint import {hf} --out {tmp}/dry",
    "probe --out {tmp}/cluster.toml",
)
"""Calls that start, write or delete something, and with --dry-run do not; of `stop` and `checkpoint merge`:
tests/system/test_json.py."""
STARTS_NOTHING = {
    **dict.fromkeys(("runs", "status", "compare", "metrics", "logs", "stacks", "docs", "plan", "design"), "reads"),
    **dict.fromkeys(("scaling", "simulate", "checkpoint-list", "checkpoint-verify"), "reads"),
    **dict.fromkeys(("config-show", "config-schema", "config-presets", "config-device"), "prints, or writes one file"),
    **dict.fromkeys(
        ("generate", "chat", "evaluate", "parity", "replay"), "computes while one waits, and keeps nothing"
    ),
    **dict.fromkeys(("watch", "serve"), "answers until Ctrl-C, and keeps nothing"),
}
"""Command -> why it has no --dry-run."""
WITH_PROCESSES = {
    "train", "launch", "stop", "sweep", "chaos", "parity", "replay", "stacks", "probe", "watch", "plan-run",
    "chat", "serve", "plan-learn", "checkpoint-merge",
}  # fmt: skip
TESTS = Path(__file__).parents[1]
IN_PROCESSES = ("system/test_json.py", "inference/test_chat.py", "inference/test_openai_server.py")
"""Tests that print the documents of `WITH_PROCESSES`."""
HOW = "give each line of its --json a type in argosy/cli/documents.py and print it with `write`, then add a call here"


@pytest.fixture(scope="module")
def places(trained: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the calls name."""
    root = tmp_path_factory.mktemp("documents")
    (root / "tmp").mkdir()
    copy = shutil.copytree(trained, root / "copy")
    (root / "jobs.toml").write_text(SMALL.format(on="slurm", deadline="30d"))
    (root / "space.toml").write_text(SPACE.replace('["N7", "N5"]', '["N5"]'))
    run_file = root / "run.toml"
    run_file.write_text(RUN_FILE.format(corpus=corpus, steps=4, every_steps=2, processes=1))
    (root / "sweep.toml").write_text(f'run = "{run_file}"\n[parameters]\n"optimizer.lr" = [1e-3, 1e-2]\n')
    rows = [(n, d, 1.69 + 406.4 / n**0.34 + 410.7 / d**0.28) for n in (1e8, 1e9, 1e10) for d in (1e9, 1e10, 1e11)]
    (root / "results.csv").write_text("parameters,tokens,loss\n" + "".join(f"{n},{d},{loss}\n" for n, d, loss in rows))
    task = task_file(root, "choices", "multiple_choice", CHOICES)
    assert main(["checkpoint", "export", str(trained), "--out", str(root / "hf")]) == 0
    return {
        "run": trained, "runs": trained.parent, "copy": copy, "corpus": corpus, "tmp": root / "tmp", "hf": root / "hf",
        "jobs": root / "jobs.toml", "space": root / "space.toml", "run_file": run_file,
        "sweep": root / "sweep.toml", "results": root / "results.csv", "task": task,
    }  # fmt: skip


@pytest.fixture
def ask(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Any]]:
    """Give a command with --json; its documents, each checked against the schema."""

    def give(call: str, document: str, code: int = 0) -> list[Any]:
        capsys.readouterr()
        words = [word.format(**places) for word in call.split()]
        found = main([*words, "--json"])
        said = capsys.readouterr()
        assert found == code, said.err
        lines = [json.loads(line) for line in said.out.splitlines()]
        checked = Draft202012Validator(schema_of(document))
        for line in lines:
            checked.validate(line)
        assert len(lines) == 1 or DOCUMENTS[document].is_many, lines
        return lines

    return give


def all_commands(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Every command, those with actions joined with each."""
    commands = []
    for name in COMMANDS:
        main([name, "--help-all"]) if name in ("checkpoint", "config") else None
        actions = re.match(r"usage: argosy \w+ \{([\w,]+)\}", capsys.readouterr().out)
        commands += [f"{name}-{action}" for action in actions[1].split(",")] if actions else [name]
    return commands


@pytest.mark.parametrize("call", ["merge {run}", "export {run} --adapter"])
def test_a_dry_run_is_refused_too_where_there_is_no_adapter(ask, call):
    (said,) = ask(f"checkpoint {call} --out {{tmp}}/dry --dry-run", "error", code=2)
    assert "has no adapter" in said["error"]


def test_what_starts_or_deletes_something_has_a_dry_run(capsys):
    tried = {"-".join(call.split()[: 1 + call.startswith("checkpoint")]) for call in DRY} | {"stop", "checkpoint-merge"}
    for command in all_commands(capsys):
        with suppress(SystemExit):
            main([*command.split("-"), "--help-all"])
        has_one = re.search(r"^\W*--dry-run\b", capsys.readouterr().out, re.M) is not None
        assert has_one == (command in tried), f"{command}: try its --dry-run in DRY"
        assert has_one != (command in STARTS_NOTHING), f"{command}: give it --dry-run, or say in STARTS_NOTHING why not"


def test_every_command_has_a_document_and_every_document_a_test(capsys):
    for command in all_commands(capsys):
        assert command in DOCUMENTS, f"argosy {command.replace('-', ' ')} has no document: {HOW}"
    for document in DOCUMENTS.keys() - {"dry-run"}:
        assert (document in CALLS) != (document in WITH_PROCESSES), f"no test prints the document {document!r}: {HOW}"
    others = "".join((TESTS / name).read_text() for name in IN_PROCESSES)
    for document in WITH_PROCESSES:
        assert re.search(rf'(ask|schema_of)\(\s*"{document}"', others), f"no test of {IN_PROCESSES} prints {document!r}"


@pytest.mark.parametrize("document", CALLS)
def test_what_a_command_prints_keeps_its_schema(document, ask):
    found = ask(CALLS[document], document, code=2 if document == "error" else 0)
    assert found or document in ("checkpoint-list-adapters", "checkpoint-prune")


@pytest.mark.parametrize("call", DRY, ids=lambda call: "-".join(call.split()[:2]).partition("-{")[0])
def test_a_dry_run_says_what_it_would_do_and_does_nothing(call, ask, places):
    before = {path: path.stat().st_mtime_ns for path in places["tmp"].parent.rglob("*")}
    (said,) = ask(f"{call} --dry-run", "dry-run")
    assert said["would"] or "prune" in call
    assert {path: path.stat().st_mtime_ns for path in places["tmp"].parent.rglob("*")} == before


def test_prints_of_libraries_and_child_processes_stay_out_of_the_documents(tmp_path):
    body = "import os, subprocess; print('word'); os.write(1, b'bytes\\n'); subprocess.run(['echo', 'child'])"
    code = f"""
import sys
from types import SimpleNamespace
from argosy import cli
from argosy.cli.documents import WrittenFile, write
def body(argv):
    {body}
    write("config-device", WrittenFile("x", ("not finite", "\\udc80")))
cli.import_module = lambda name: SimpleNamespace(main=body)
sys.exit(cli.main(["config", "--json"]))
"""
    done = run_python("-c", code)
    assert done.returncode == 0 and json.loads(done.stdout) == {"out": "x", "notes": ["not finite", "\udc80"]}
    assert sorted(done.stderr.split()) == ["bytes", "child", "word"]


def test_numbers_that_are_not_finite_are_null(capsys):
    write("evaluate", Score(float("nan"), float("inf"), 1.0, 3))
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] is None and found["perplexity"] is None
    Draft202012Validator(schema_of("evaluate")).validate(found)


def test_help_lists_every_document(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["config", "schema", "--help"])
    rows = re.findall(r"^  ([\w-]+)  +(.*)$", capsys.readouterr().out.partition("Documents:\n")[2], re.M)
    assert dict(rows) == {name: kind.about + "; any number of lines" * kind.is_many for name, kind in DOCUMENTS.items()}
