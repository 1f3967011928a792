"""Code that a run's folder brings along is run only if this user knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.extend.declared import CodeFile, read_code
from argosy.extend.loading import load_code
from argosy.extend.trust import APPROVED, APPROVED_FILE, approve, check_approved

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
    script = LOAD.replace("l([", "__import__('argosy.extend.trust').extend.trust.approve([")
    files = [tmp_path / f"f{number}.py" for number in range(4)]
    for file in files:
        file.write_text(f"from argosy import extend\n@extend.metric('{file.stem}')\ndef f(run): return 1.0\n")
    processes = [subprocess.Popen([sys.executable, "-c", script, str(file)]) for file in files]
    assert [process.wait(60) for process in processes] == [0] * 4
    check_approved([read_code(file) for file in files])
