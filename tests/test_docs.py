"""What the documents promise works: their commands are run, their files exist, their keys are the schema's."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from argosy.config.data import FiltersConfig, Objective
from argosy.config.launch import EngineName
from argosy.config.load import load
from argosy.config.model import FAMILIES
from argosy.models.gguf_file import ARCHITECTURES
from argosy.plan.design.space import DesignSpace
from argosy.plan.plan import Plan
from argosy.plan.sync import COMPRESSED
from argosy.sinks.table import SINKS
from argosy.sweep.config import Method
from argosy.watch.alerts import FINDINGS
from argosy.watch.conclusions import ADVICE_RULES

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/clusters").glob("*.md")),
]
EVENTS = ROOT / "docs" / "events.md"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCORE = re.compile(r"^\| `runs/(\w+)` \|.*\| (\d+) % \|$", re.MULTILINE)
"""A row of a table that states the score of a run which the document's commands have made."""
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def blocks(document: Path) -> list[tuple[str, str | None, str]]:
    """(language, file name if it is one, text) of each fenced block."""
    return [(m[1], m[2], m[3]) for m in BLOCK.finditer(document.read_text())]


WITH_COMMANDS = [
    pytest.param(d, id=d.name, marks=pytest.mark.slow)
    for d in DOCUMENTS
    if any(block[0] == "console" for block in blocks(d))
]


@pytest.mark.parametrize("document", WITH_COMMANDS)
def test_the_commands_of_a_document_work_in_order(document: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for language, name, text in blocks(document):
        if name:
            (tmp_path / name).write_text(text)
        elif language == "console":
            for line in text.splitlines():
                run(line.removeprefix("$ "), tmp_path)
        elif language == "python":
            run_python(text, tmp_path)
    scores = {name: float(stated) / 100 for name, stated in SCORE.findall(document.read_text())}
    for name, stated in scores.items():
        *_, last = (tmp_path / "runs" / name / "scores.jsonl").read_text().splitlines()
        assert next(iter(json.loads(last)["tasks"].values()))["exact_match"] == pytest.approx(stated, abs=0.15), name


def run(command: str, folder: Path) -> None:
    command = re.sub(r"^argosy\b", f"{sys.executable} -m argosy", command)
    command = re.sub(r"^python\b", sys.executable, command)
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def run_python(code: str, folder: Path) -> None:
    # A file, not -c: what it starts imports its main module again.
    script = folder / "document.py"
    script.write_text("if __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in code.splitlines()))
    done = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_to_files_lead_somewhere(document: Path) -> None:
    for target, _ in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize(
    "example",
    [
        *(path for path in sorted((ROOT / "examples").glob("*.toml")) if path.name != "jobs.toml"),  # of several runs
        ROOT / "examples" / "fine-tuning" / "base.toml",  # the others there begin with a run's weights
    ],
    ids=lambda p: p.name,
)
def test_examples_are_valid_files(example: Path) -> None:
    """Run files, and spaces of devices, whose names begin with "design"."""
    if example.stem.startswith("design"):
        assert DesignSpace.load(example).device.axes or DesignSpace.load(example).speedup
    else:
        assert load(example).name == example.stem


@pytest.mark.parametrize("example", sorted((ROOT / "examples" / "extend").glob("*.py")), ids=lambda p: p.name)
def test_the_page_on_extensions_has_each_example_as_it_is(example: Path) -> None:
    assert ("python", example.name, example.read_text()) in blocks(ROOT / "docs" / "extending.md")


def test_the_files_to_touch_exist_and_define_what_is_named() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    touched = page[page.index("## If you want to add X") : page.index("## How data flows")]
    places = {path: _place(path) for path in re.findall(r"`(\w[\w./-]*(?:/[\w-]*|\.(?:py|toml|csv)))`", touched)}
    assert len(places) > 70
    assert [path for path, place in places.items() if not place.exists()] == []
    defined = re.findall(r"`(\w+)` of `([\w./-]+\.py)`", touched)
    assert ("ENGINES", "engines/table.py") in defined
    assert [(name, path) for name, path in defined if not re.search(rf"\b{name}\b", places[path].read_text())] == []


def _place(path: str) -> Path:
    return ROOT / path if (ROOT / path).exists() else ROOT / "src" / "argosy" / path


def test_the_page_of_a_table_has_each_of_its_words() -> None:
    """Whoever adds a rule of advice, say, is told of its page here."""
    words: dict[str, Iterable[str]] = {
        "advice": (rule.__name__ for rule in ADVICE_RULES),
        "data": FiltersConfig.model_fields,
        "export": ARCHITECTURES,
        "families": FAMILIES,
        "fine-tuning": set(get_args(Objective)) - {"pretrain"},
        "parallelism": Plan.model_fields,
        "sinks": SINKS,
        "sweeps": get_args(Method),
        "thin-links": COMPRESSED,
    }
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in words}
    missing = {page: [word for word in known if f"`{word}`" not in pages[page]] for page, known in words.items()}
    assert {page: absent for page, absent in missing.items() if absent} == {}
    assert {page.stem for page in (ROOT / "docs" / "clusters").glob("*.md")} == set(get_args(EngineName))


def test_the_number_of_families_is_that_of_the_table() -> None:
    told = [int(n) for page in DOCUMENTS for n in re.findall(r"(\d+) families", page.read_text())]
    assert len(told) > 2 and set(told) == {len(FAMILIES)}


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)`", document.read_text()))
        assert named <= targets, document.name


def test_every_event_that_the_code_writes_is_in_the_table_of_events() -> None:
    table = EVENTS.read_text()
    written = {name for file in (ROOT / "src").rglob("*.py") for name in _events_written(file.read_text())}
    assert {"worker_died", "recovered", "resume"} < written
    assert sorted(name for name in written if f"`{name}`" not in table) == []


def test_the_page_counts_each_finding_and_each_failure_in_the_table_of_events_as_a_fault() -> None:
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", EVENTS.read_text(), re.MULTILINE))))
    failures = {name for name in told if name.endswith(("_died", "_failed", "_off", "_damaged", "_corrupt"))}
    page = (ROOT / "src/argosy/watch/page/vitals.js").read_text()
    faults = set(re.findall(r'"(\w+)"', page[page.index("FAULTS = ") : page.index("]);")]))
    assert {"server_died", "user_code_off", "straggler"} < failures | FINDINGS.keys() <= faults


def _events_written(code: str) -> Iterator[str]:
    """The names in `events.write("NAME", ...)` and in `tell` and `_hear`, which write events for others."""
    for node in ast.walk(ast.parse(code)) if any(f".{word}(" in code for word in ("tell", "_hear", "write")) else ():
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=writer), args=[ast.Constant(value=str(name)), *_]):
                if method in ("tell", "_hear") or (method == "write" and "events" in ast.unparse(writer)):
                    yield name


def test_the_published_schema_is_the_code_s() -> None:
    from argosy.config.schema import RunConfig

    published = (ROOT / "docs" / "run.schema.json").read_text().strip()
    assert published == _schema(RunConfig), "`make docs` writes it anew"


def _schema(config: type) -> str:
    import json

    return json.dumps(config.model_json_schema(), indent=2)
