"""`argosy prepare`: what it says of what it made."""

import json
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
    assert "every byte matches its checksum" in capsys.readouterr().out


def test_messages_name_the_options_of_the_command(prepared):
    with pytest.raises(UserError, match=r"^--out data: prepared already.*Choose another --out, or delete data\.$"):
        prepare.main(["my text.txt", "--out", "data", "--vocab-size", "400"])
    with pytest.raises(UserError, match=r"^nowhere\.txt: there is no such file or folder\. .* alone\.$"):
        prepare.main(["nowhere.txt", "--out", "other"])


def test_a_place_that_nothing_can_be_copied_to_is_refused_before_anything_is_prepared(prepared):
    with pytest.raises(UserError, match=r"^--remote foo://bucket/x: data cannot be read from foo://"):
        prepare.main(["my text.txt", "--out", "other", "--vocab-size", "300", "--remote", "foo://bucket/x"])
    assert not (prepared.parent / "other").exists()


def test_nothing_of_a_folder_is_dropped_in_silence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("BSD", "GPL-2", "GPL-3", "LGPL"):
        (tmp_path / "mine" / name).write_text("a licence of many words")
    (tmp_path / "mine" / "broken.txt").write_bytes(b"\xff")
    (tmp_path / "mine" / "empty.md").write_bytes(b"")
    (tmp_path / "mine" / "a.jsonl").write_text(
        "".join(f'{{"text": "text {n}"}}\n' for n in range(20)) + '{"body": 1}\n'
    )
    argv = ["mine", "--vocab-size", "300", "--processes", "1", "--validation-fraction", "0"]
    dropped = (
        "; 3 documents skipped: 1 x broken UTF-8, 1 x empty document, 1 x no such field"
        f"\n  {tmp_path / 'mine' / 'broken.txt'}, byte 0: broken UTF-8"
        f"\n  {tmp_path / 'mine' / 'a.jsonl'}, line 21, field 'text' (the record has 'body'): no such field"
    )
    left_out = "; 4 files left out: BSD, GPL-2, GPL-3, ... (no known extension: `--extensions '*'` reads them)"
    for _ in range(2):  # the second time nothing is prepared, and it is told all the same
        prepare.main([*argv, "--out", "out"])
        assert f"out: 20 documents from 3 files{left_out}{dropped}\n" in capsys.readouterr().out
    prepare.main([*argv, "--out", "all", "--extensions", "*"])
    assert f"all: 24 documents from 7 files{dropped}\n" in capsys.readouterr().out


def test_text_that_has_another_field_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(
        UserError, match=r"no text in it \(skipped: 1 x no such field; first .*a\.jsonl, line 1, .*'body'"
    ):
        prepare.main(["a.jsonl", "--out", "out", "--vocab-size", "300", "--processes", "1"])


def test_files_after_the_limit_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in "abcd":
        (tmp_path / "mine" / f"{name}.txt").write_text("twelve bytes")
    argv = ["mine", "--out", "out", "--vocab-size", "300", "--processes", "1", "--validation-fraction", "0"]
    prepare.main([*argv, "--max-text-bytes", "18"])
    said = capsys.readouterr().out
    assert "out: 2 documents from 2 files; 2 files not read: max_text_bytes is reached\n" in said


def test_conversations_are_shown_with_what_is_learned_of_them(prepared, capsys, monkeypatch):
    pairs = [{"prompt": f"{n}+1?", "chosen": f"{n + 1}\x1b[2J", "rejected": "no"} for n in range(3)]
    (prepared.parent / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    argv = ["pairs.jsonl", "--objective", "dpo", "--tokenizer", "data", "--chat-template", "chatml", "--out", "pairs"]
    prepare.main([*argv, "--processes", "1", "--validation-fraction", "0", "--show", "2"])
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert capsys.readouterr().out.partition("\n\n")[2].splitlines() == [
        *("--- conversation 1, chosen", *start.format("0+1?").splitlines(), "{+1\\x1b[2J<|im_end|>+}", "", ""),
        *("--- conversation 1, rejected", *start.format("0+1?").splitlines(), "{+no<|im_end|>+}", "", ""),
        *("--- conversation 2, chosen", *start.format("1+1?").splitlines(), "{+2\\x1b[2J<|im_end|>+}", "", ""),
        *("--- conversation 2, rejected", *start.format("1+1?").splitlines(), "{+no<|im_end|>+}", ""),
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    prepare.main(["--out", "pairs", "--verify", "--show", "1"])
    assert f"{prepare.GREEN_STYLE}no<|im_end|>{prepare.RESET_STYLE}" in capsys.readouterr().out
    with pytest.raises(UserError, match="--show 3 prints conversations: say what they are for"):
        prepare.main(["my text.txt", "--out", "other", "--show", "3"])
    with pytest.raises(UserError, match="--seq-len 64 is of conversations: say what they are for"):
        prepare.main(["my text.txt", "--out", "other", "--seq-len", "64"])
    with pytest.raises(UserError, match="data holds text, and no conversations"):
        prepare.main(["--out", "data", "--verify", "--show", "3"])
