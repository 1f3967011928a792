"""Code of the user's is imported where it is needed, once, and is what was checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.extend.declared import CodeFile, read_code, read_package
from argosy.extend.loading import load_code
from argosy.extend.trust import approve

HEAD = "from argosy import extend\n\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(HEAD + text)
    return path


def approved(path: Path) -> list[CodeFile]:
    code = [read_code(path)]
    approve(code)
    return code


def test_a_file_is_imported_once_and_gives_what_it_declares(tmp_path):
    path = write(tmp_path, "calls = []\n@extend.metric('m')\ndef f(run):\n    calls.append(run)\n    return len(calls)")
    code = approved(path)
    (first,), (second,) = load_code(code), load_code(code)
    assert [first.function(0), second.function(0)] == [1, 2]
    assert first.declared == code[0].declarations[0]


def test_the_bytes_that_were_checked_are_run(tmp_path):
    path = write(tmp_path, "@extend.metric('m')\ndef f(run): return 1")
    code = approved(path)
    write(tmp_path, "@extend.metric('m')\ndef f(run): return 2")
    assert load_code(code)[0].function(None) == 1


def test_an_error_while_importing_is_told_with_its_line_and_again(tmp_path):
    code = approved(write(tmp_path, "import nothing_of_that_name\n@extend.metric('m')\ndef f(run): ..."))
    for _ in range(2):
        with pytest.raises(UserError, match=r"mine.py:3: ModuleNotFoundError: .*nothing_of_that_name"):
            load_code(code)


def test_what_the_text_does_not_show_is_refused(tmp_path):
    code = approved(write(tmp_path, "def f(run): ...\nextend.metric('b')(f)\n@extend.metric('a')\ndef g(run): ..."))
    with pytest.raises(UserError, match="registers a metric b that its text does not show"):
        load_code(code)


def test_what_importing_does_not_define_is_refused(tmp_path):
    text = "raise_early = True\n@extend.metric('a')\ndef f(run): ...\n"
    code = approved(write(tmp_path, text.replace("@", "@(lambda r: lambda f: f)(0)\n@")))
    assert load_code(code)  # a decorator around it is none of our business
    (tmp_path / "other").mkdir()
    path = write(tmp_path / "other", "class extend:\n    metric = staticmethod(lambda name: lambda f: f)\n" + text)
    with pytest.raises(UserError, match="metric a is declared, but importing"):
        load_code(approved(path))


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with an entry point, as pip would leave it."""
    package = tmp_path / "moonshot"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "metrics.py").write_text(f"{HEAD}@extend.metric('height')\ndef height(run): return 1.0\n")
    facts = tmp_path / "moonshot-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: moonshot\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[argosy.extensions]\nmoonshot = moonshot.metrics\nlost = moonshot.nothing\nbroken = nopackage.a\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_an_installed_package_is_used_by_the_name_of_its_entry_point(installed):
    code = read_package("moonshot")
    assert code.path == installed / "moonshot" / "metrics.py"
    assert load_code([code])[0].function(None) == 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("moonshoot", "did you mean moonshot?"),
        ("zzz", "there are: broken, lost, moonshot"),
        ("lost", "the module moonshot.nothing of lost has no file"),
        ("broken", "the module nopackage.a of broken cannot be found"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_refused(installed, name, said):
    with pytest.raises(ValueError) as error:
        read_package(name)
    assert said in str(error.value)
