"""A wrong call of any command with --json gets one error document and exit code 2, and writes nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from argosy.cli import COMMANDS, main
from argosy.cli.documents import schema_of

MEANINGLESS = """
trian
train garbage.toml
train ~nobody/run.toml
train broken.toml
train folder
train --train.steps -5
train --optimizer.lr nan
train --optimizer.lr fast
train --plan tp=0
train --plan nonsense
train --model.preset nothing
train --no.such.key 1
launch --on moon
launch --nodes 0
launch nowhere.toml
runs nowhere
runs garbage.toml
runs . --where "loss <"
runs . --where "__import__('os')"
runs . --sort nonsense
status nowhere
status folder
status garbage.toml
compare folder folder
compare nowhere nowhere
metrics folder
metrics folder --every 0
metrics folder --format parquet
logs nowhere
logs folder
stop nowhere
stop folder
sweep nowhere.toml
sweep garbage.toml
sweep broken.toml
sweep broken.toml --gpus-per-trial -1
prepare nowhere.txt --out data
prepare garbage.toml --vocab-size 0 --out data
watch nowhere
watch garbage.toml
watch . --allow fly --mcp-http
watch . --allow stop
watch . --port 99999
watch . --terminal
watch . --mcp
checkpoint
checkpoint fly
checkpoint list nowhere
checkpoint list garbage.toml
checkpoint list folder
checkpoint verify folder
checkpoint prune folder --keep-last 0
checkpoint export folder --out out
checkpoint import folder --out out
checkpoint import nowhere --out out
checkpoint merge folder --out out
generate nowhere
generate folder
generate folder --max-tokens -1
chat nowhere
serve nowhere
serve folder --port -1
evaluate nowhere
evaluate folder
parity --plan tp=3
parity --tolerance -1
replay nowhere --step 1
replay folder --step 1
stacks nowhere
stacks folder
chaos nowhere.toml
chaos garbage.toml
chaos parity --every-s inf
chaos parity --minutes -1
probe --model llama3-8
probe --device h10
probe --minutes 0
probe --minutes inf
probe --site oslo
plan
plan --model none --cluster 8xh100
plan --model llama3-8b
plan --model llama3-8b --cluster 8xnothing
plan --model llama3-8b --cluster 0xh100
plan --model llama3-8b --cluster ~nobody/cluster.toml
plan --model llama3-8b --cluster 8xh100 --fix "tp=|"
plan --model llama3-8b --cluster 8xh100 --within never
plan --model llama3-8b --cluster 8xh100 --serve --draft x
plan --jobs garbage.toml
plan --learn nowhere
design nowhere.toml
design garbage.toml
scaling nowhere.csv --budget 1e21
scaling garbage.toml --budget 1e21
simulate nowhere.toml
simulate parity --plan tp=3
simulate parity --world-size 0
docs nowhere
docs ../../etc/passwd
config
config fly
config show nowhere.toml
config show garbage.toml
config schema --of nothing
config device mine
config device mine --bf16-tflops 1 --memory-gb 1 --memory-gb-s 1
config show --model.weights ~nobody/weights
"""
"""Each says something that cannot be done in a folder with `garbage.toml`, `broken.toml` and an empty `folder`."""
WRONG_VALUES = {"Literal": "nonsense", "int": "1.5.2", "float": "many", "Count": "1.5.2"}


def with_wrong_values() -> Iterator[str]:
    """Yield a call for each option of each command that takes a number or one of some words, with another value."""
    for command in COMMANDS:
        module = import_module(f"argosy.cli.{command}")
        for kind in vars(module).values():
            if not (isinstance(kind, type) and is_dataclass(kind) and _is_parsed(kind, command, module.__name__)):
                continue
            for field in fields(kind):
                wrong = next((value for word, value in WRONG_VALUES.items() if word in str(field.type)), None)
                if wrong is not None and "Positional" not in str(field.type):
                    yield f"{command} --{field.name.replace('_', '-')}={wrong}"


def _is_parsed(kind: type[Any], command: str, module: str) -> bool:
    return kind.__name__ == "Options" and kind.__module__ == module and command not in ("checkpoint", "config")


UNKNOWN = ("--nothing-such", "--nothing-such 3 -z", "'\x1b[31m' --json=perhaps --nothing-such")
CALLS = [
    *filter(None, MEANINGLESS.splitlines()),
    *with_wrong_values(),
    *(f"{command} {words}" for command in COMMANDS for words in UNKNOWN),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the calls name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "garbage.toml").write_bytes(bytes(range(256)))
    (tmp_path / "broken.toml").write_text('train = [1, {steps = "\x1b[31m')
    return tmp_path


def test_there_are_at_least_two_hundred_and_every_command_has_some() -> None:
    assert len(set(CALLS)) >= 200
    assert {call.split()[0] for call in CALLS} >= COMMANDS.keys()


@pytest.mark.parametrize("call", CALLS, ids=ascii)
def test_a_wrong_call_gets_one_error_document_and_writes_nothing(call, place, capsys):
    before = sorted(place.rglob("*"))
    code = main([*shlex.split(call), "--json"])
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    found = json.loads(line)
    Draft202012Validator(schema_of("error")).validate(found)
    assert code == found["exit_code"] == 2, found
    assert found["error"] and "\x1b" not in found["error"] and "Traceback" not in said.err
    assert sorted(place.rglob("*")) == before
