"""What `argosy watch` refuses before it opens a port, with what to do instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy import cli


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an empty file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "runs: no such folder. Train one with `argosy train`, or name a run's folder or one that holds runs: "
         "argosy watch FOLDER"),
        (["none"], "none: no such folder. Name a run's folder or one that holds runs: argosy watch FOLDER"),
        (["file"], "file: a file. Name the folder of a run, such as .."),
        ([".", "--json", "--terminal"], "--json is for the page, and with --terminal there is none. Leave one of them "
         "out."),
        ([".", "--mcp", "--port", "8765"], "--port is for the page, and with --mcp there is none. Leave one of them "
         "out."),
        ([".", "--terminal", "--mcp"], "--terminal and --mcp: both want stdin and stdout. Leave one of them out."),
        ([".", "--mcp", "--allow", "stop, fly"], "--allow fly: there is no such thing. Allow some of: start, stop, "
         "replan."),
        ([".", "--allow", "stop,stop"], "--allow: it says what agents may do; give --mcp or --mcp-http as well."),
    ],
)  # fmt: skip
def test_a_call_that_shows_nothing_is_refused(words, message, capsys):
    assert cli.main(["watch", *words]) == 2
    said = capsys.readouterr()
    assert said.err == f"argosy: {message}\n"
