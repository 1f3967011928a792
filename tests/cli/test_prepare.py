"""`argosy prepare`: what it says of what it made."""

import pytest

from argosy.cli import prepare
from argosy.errors import ArgosyWarning


def test_few_tokens_are_counted_one_by_one_and_too_few_held_out_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(200)))
    argv = ["a.jsonl", "--out", "out", "--vocab-size", "300", "--processes", "1", "--validation-fraction", "0.1"]
    with pytest.warns(ArgosyWarning, match=r"tokens are held out, too few .* raise --validation-fraction"):
        prepare.main(argv)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("out: train ") and " tokens, validation " in last and "M" not in last
