"""Code of the user's is imported where it is needed, once, and is what was checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.extend.declared import CodeFile, read_code, read_package
from argosy.extend.loading import APPROVED, APPROVED_FILE, approve, check_approved, load_code

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


LOAD = "import sys; from pathlib import Path; from argosy.extend.declared import read_code as r; \
from argosy.extend.loading import load_code as l; l([r(Path(sys.argv[1]))])"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The state folder of a user who has approved nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv(APPROVED, "")
    return tmp_path / "state" / "argosy"


@pytest.fixture
def code(tmp_path) -> list[CodeFile]:
    """A file that leaves a mark when it is run."""
    path = tmp_path / "theirs.py"
    path.write_text(
        f"from pathlib import Path\nfrom argosy import extend\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "@extend.metric('m')\ndef f(run): return 1.0\n"
    )
    return [read_code(path)]


def test_code_that_nobody_approved_is_not_run(home, code, tmp_path):
    with pytest.raises(UserError, match=r"theirs.py: code of the run \(sha256 \w{12}\.\.\.\) .* --trust-code"):
        load_code(code)
    assert not (tmp_path / "ran").exists()
    assert not home.exists()  # asking writes nothing


def test_approved_code_is_known_later_and_changed_code_is_not(home, code, tmp_path, monkeypatch):
    approve(code)
    monkeypatch.setenv(APPROVED, "")  # another day
    assert load_code(code)
    path = code[0].path
    path.write_text(path.read_text() + "# changed\n")
    with pytest.raises(UserError, match="--trust-code"):
        check_approved([read_code(path)])
    check_approved([read_code(path)], trust_code=True)
    check_approved([read_code(path)])
    kept = home / APPROVED_FILE
    assert len(kept.read_text().splitlines()) == 2
    assert kept.stat().st_mode & 0o777 == 0o600


def test_approvals_that_others_may_have_written_count_for_nothing(home, code, monkeypatch):
    approve(code)
    monkeypatch.setenv(APPROVED, "")
    (home / APPROVED_FILE).chmod(0o666)
    with pytest.raises(UserError, match="--trust-code"):
        check_approved(code)
    (home / APPROVED_FILE).unlink()
    os.mkfifo(home / APPROVED_FILE)  # nobody writes to it, and nothing waits for that
    with pytest.raises(UserError, match="--trust-code"):
        check_approved(code)


def test_a_process_without_a_home_approves_for_itself_and_its_children(home, code, tmp_path):
    home.parent.write_text("a file where the folder would be")
    approve(code)
    subprocess.run([sys.executable, "-c", LOAD, str(code[0].path)], check=True)
    assert (tmp_path / "ran").exists()


def test_approvals_at_the_same_time_are_all_kept(home, tmp_path):
    script = LOAD.replace("l([", "__import__('argosy.extend.loading').extend.loading.approve([")
    files = [tmp_path / f"f{number}.py" for number in range(4)]
    for file in files:
        file.write_text(f"from argosy import extend\n@extend.metric('{file.stem}')\ndef f(run): return 1.0\n")
    processes = [subprocess.Popen([sys.executable, "-c", script, str(file)]) for file in files]
    assert [process.wait(60) for process in processes] == [0] * 4
    check_approved([read_code(file) for file in files])
