"""The manual that `argosy docs` prints is that of this version, and the skill fits an agent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from argosy import cli
from argosy.errors import UserError
from argosy.watch import manual
from argosy.watch.alerts import CHECKS
from argosy.watch.conclusions import ADVICE_RULES

DOCS = Path(__file__).parents[2] / "docs"


def test_each_page_is_there_by_its_name() -> None:
    assert {"planning", "clusters/slurm", "skill"} <= set(manual.topics())
    assert manual.page("clusters/slurm") == (DOCS / "clusters/slurm.md").read_text()
    with pytest.raises(UserError, match="did you mean planning"):
        manual.page("planing")


def test_an_installed_package_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "share/argosy/docs/clusters/slurm.md"
    page.parent.mkdir(parents=True)
    page.write_text("# SLURM")

    class Listed:
        suffix = ".md"

        def locate(self) -> Path:
            return page

        def __str__(self) -> str:
            return "../../../share/argosy/docs/clusters/slurm.md"

    monkeypatch.setattr(manual, "CHECKOUT", tmp_path / "nowhere")
    monkeypatch.setattr(manual, "files", lambda name: [Listed()])
    assert manual.topics() == ["clusters/slurm"] and manual.page("clusters/slurm") == "# SLURM"


def test_the_skill_is_short_and_names_only_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docs", "--skill"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 200 and text.startswith("---\nname: argosy\n")
    commands = set(re.findall(r"\bargosy ([a-z]+)", text)) - {"for"}
    assert commands <= {*cli.COMMANDS}
    rules = {rule.__name__ for rule in ADVICE_RULES} | CHECKS.keys() | {"silent", "dead", "failed", "none"}
    table = text[text.index("| `next.rule` |") : text.index("## Act through")]
    rows = (row.split("|")[1] for row in table.splitlines()[2:] if row.startswith("|"))
    assert {rule for row in rows for rule in re.findall(r"`(\w+)`", row)} <= rules
