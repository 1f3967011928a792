"""`argosy prepare`: what it says of what it made."""

import shlex

import pytest

from argosy import cli
from argosy.cli import prepare
from argosy.errors import ArgosyWarning, UserError


def test_few_tokens_are_counted_one_by_one_and_too_few_held_out_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(200)))
    argv = ["a.jsonl", "--out", "out", "--vocab-size", "300", "--processes", "1", "--validation-fraction", "0.1"]
    with pytest.warns(ArgosyWarning, match=r"tokens are held out, too few .* raise --validation-fraction"):
        prepare.main(argv)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("out: train ") and " tokens, validation " in last and "M" not in last


@pytest.fixture
def prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text("Some words of a text. " * 300)
    assert cli.main(["prepare", "my text.txt", "--out", "data", "--vocab-size", "300"]) == 0
    capsys.readouterr()
    return tmp_path / "data"


def test_the_advice_about_damaged_data_is_the_whole_command(prepared, capsys):
    shard = next(prepared.glob("*.bin"))
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert cli.main(["prepare", "--out", "data", "--verify"]) != 0
    command = capsys.readouterr().err.strip().rsplit("prepare it again: argosy ", 1)[1]
    for file in prepared.iterdir():
        file.unlink()
    assert cli.main(shlex.split(command)) == 0
    assert cli.main(["prepare", "--out", "data", "--verify"]) == 0


def test_messages_name_the_options_of_the_command(prepared):
    with pytest.raises(UserError, match=r"^--out data: prepared already.*Choose another --out, or delete data\.$"):
        prepare.main(["my text.txt", "--out", "data", "--vocab-size", "400"])
    with pytest.raises(UserError, match=r"^nowhere\.txt: there is no such file or folder\. .* alone\.$"):
        prepare.main(["nowhere.txt", "--out", "other"])
