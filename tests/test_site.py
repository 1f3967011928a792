"""The site of the documents: it builds, its links lead somewhere, its reference is whole, it needs no other host."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "site"))

import links  # noqa: E402
from reference import commands, prometheus, python_api, run_file  # noqa: E402

from argosy.cli import COMMANDS  # noqa: E402
from argosy.config.schema import RunConfig  # noqa: E402
from argosy.config.section import dotted, key_fields  # noqa: E402
from argosy.plan.plan import Plan  # noqa: E402
from waiting import PATIENT_S  # noqa: E402


@pytest.mark.slow  # `make docs` does the same, a job of its own in CI
def test_the_site_builds_without_a_warning_and_every_link_in_it_leads_somewhere(tmp_path: Path) -> None:
    """MkDocs' strict mode also refuses a page of docs/ that the navigation lacks, and an entry without a page."""
    command = [sys.executable, ROOT / "docs" / "site" / "build.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="gone.html">x</a>', "index.html links to gone.html, which is not there"),
        ('<a href="#gone">x</a>', "index.html links to #gone, which has no such anchor"),
        ('<a href="other.html#gone">x</a>', "index.html links to other.html#gone, which has no such anchor"),
        ('<img src="gone.png">', "index.html links to gone.png, which is not there"),
        (
            '<script src="https://cdn.example/x.js"></script>',
            "index.html loads https://cdn.example/x.js from another host",
        ),
        (
            '<link rel="stylesheet" href="//cdn.example/x.css">',
            "index.html loads //cdn.example/x.css from another host",
        ),
    ],
)
def test_the_check_of_links_names_what_is_wrong(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">other</h1>')
    (tmp_path / "index.html").write_text(text)
    assert problem in links.check(tmp_path)[0]


def test_links_that_are_right_are_no_problem_and_other_hosts_are_listed(tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">other</h1>')
    text = '<a href="other.html#here">a</a><a href="#top">b</a><i id="top"></i><a href="https://example.org/">c</a>'
    (tmp_path / "index.html").write_text(text)
    assert links.check(tmp_path) == ([], ["https://example.org/"])


@pytest.mark.parametrize("css", ["@import 'x.css';", "a{src:url(https://fonts.example/x.woff)}", "a{src:url('//x')}"])
def test_a_style_sheet_that_fetches_something_is_named(css: str, tmp_path: Path) -> None:
    (tmp_path / "site.css").write_text(css)
    assert links.check(tmp_path)[0] == ["site.css loads something from another host"]


def test_every_key_of_the_run_file_and_of_the_plan_has_an_anchor_and_a_meaning() -> None:
    page = run_file.page()
    for name in [*map(dotted, key_fields(RunConfig)), *(f"plan.{key}" for key in Plan.model_fields)]:
        row = re.search(rf'^\| <a id="{re.escape(name)}".*\|$', page, re.MULTILINE)
        assert row, name
        assert len(row[0].split("|")[4].strip()) > 3, f"{name}: no meaning"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_that_help_shows_is_in_the_reference(command: str) -> None:
    shown = re.findall(r"^│ (--[\w.-]+|[A-Z]{2,})", commands.help_of(command), re.MULTILINE)
    page = commands.command(command)
    assert [option for option in shown if f"| `{option}" not in page] == []


def test_the_python_reference_has_every_public_name() -> None:
    import argosy

    page = python_api.page()
    names = [name for name in argosy.__all__ if not name.startswith("_")]
    names += [f"extend.{name}" for name in argosy.extend.__all__]
    for name in names:
        section = re.search(rf"^## {re.escape(name)} .*\n\n(.+)", page, re.MULTILINE)
        assert section and not section[1].startswith("#"), name


def test_the_page_of_prometheus_has_every_name() -> None:
    from argosy.watch.prometheus import METRIC_HELP

    page = prometheus.page()
    assert METRIC_HELP and all(f"| `{name}` |" in page for name in METRIC_HELP)
