"""The `argosy` command itself: what it starts, how it ends."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest

import argosy
from argosy import cli
from argosy.errors import RunFailed, UserError
from waiting import PATIENT_S


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )


@pytest.fixture
def command(monkeypatch):
    """Give `argosy train` another body."""

    def install(body):
        monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=body))

    return install


def fails_with(error: BaseException):
    def body(argv):
        raise error

    return body


@pytest.mark.parametrize("code", ["import argosy; dir(argosy)", "from argosy.cli import main; main(['--help'])"])
def test_import_and_help_load_nothing_heavy(code):
    heavy = "{'torch', 'tyro', 'pydantic', 'numpy'} & set(sys.modules)"
    done = run_python("-c", f"import sys; {code}; assert not {heavy}, {heavy}")
    assert done.returncode == 0, done.stderr


def test_a_command_that_is_refused_does_not_wait_for_torch():
    commands = [
        ["train", "nowhere.toml"],
        ["generate", "nowhere"],
        ["evaluate", "nowhere"],
        ["checkpoint", "import", "nowhere", "--out", "x"],
        ["checkpoint", "export", "nowhere", "--out", "x"],
        ["probe", "--model", "llama3-8"],
        ["probe", "--device", "h10"],
        ["chaos", "nowhere.toml"],
        ["parity", "--plan", "tp=3"],
    ]
    code = f"import sys; from argosy.cli import main; print([main(c) for c in {commands}], 'torch' in sys.modules)"
    kept = "import gc; print(gc.isenabled(), gc.get_freeze_count() > 10_000)  # what they imported stays"
    done = run_python("-c", f"{code}\n{kept}")
    assert done.stdout == f"{[2] * len(commands)} False\nTrue True\n"
    assert "Try plan.tp = 2 or 4." in done.stderr


def test_the_public_names_are_lazy_and_listed():
    assert set(argosy.__all__) <= set(dir(argosy))
    assert all(getattr(argosy, name) is not None for name in argosy.__all__)
    quick = "import sys, argosy; argosy.UserError, argosy.PrepareConfig, argosy.Report; print('torch' in sys.modules)"
    assert run_python("-c", quick).stdout == "False\n"
    assert argosy.RunConfig.__name__ == "RunConfig"
    assert argosy.load("demo").name == "demo"
    with pytest.raises(AttributeError, match="nothing"):
        _ = argosy.nothing


def test_no_room_hides_a_public_name():
    from pkgutil import iter_modules

    assert not {module.name for module in iter_modules(argosy.__path__)} & set(argosy.__all__)


def test_help_lists_the_commands_in_80_columns_and_version_the_version(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main([]) == cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert max(map(len, text.splitlines())) <= 80
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(
        rf"argosy {re.escape(argosy.__version__)}( \([0-9a-f]+(-dirty)?\))?, torch \d\S+, Python 3\.\d+\.\S+\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_takes_help_all(command, capsys):
    with suppress(SystemExit):
        assert cli.main([command, "--help-all"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: argosy {command} ")


@pytest.mark.parametrize("action", ["list", "verify", "prune", "merge", "export", "import"])
def test_an_action_opens_its_help_with_examples_of_its_own(action, capsys):
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", action, "--help"])
    examples = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  argosy checkpoint")]
    assert examples and all(line.startswith(f"  argosy checkpoint {action} ") for line in examples)


def test_an_unknown_command_gets_the_near_one(capsys):
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == "argosy: no command 'trian'; did you mean train?\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("wrong"), 2), (RunFailed("wrong"), 1), (KeyboardInterrupt(), 130)],
    ids=repr,
)
def test_an_error_becomes_an_exit_code_without_a_traceback(command, capsys, error, code):
    command(fails_with(error))
    assert cli.main(["train"]) == code
    stopped = "argosy train: stopped. What was prepared or saved is kept; the same command goes on"
    assert capsys.readouterr().err == (f"{stopped} from there.\n" if code == 130 else "argosy: wrong\n")


def test_debug_shows_the_traceback(command, capsys, monkeypatch):
    monkeypatch.setenv("ARGOSY_DEBUG", "1")
    command(fails_with(UserError("wrong")))
    cli.main(["train"])
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_not_hidden(command):
    command(fails_with(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_the_real_command_ends_with_code_and_text():
    done = run_python("-m", "argosy", "config", "show", "no.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("argosy: no.toml: no such run file or preset")


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs POSIX pipes")
def test_a_reader_that_has_seen_enough_is_no_error():
    line = f"{sys.executable} -m argosy config schema | head -n 1"
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize("command", ["train", "config", "evaluate"])
def test_help_of_a_command_is_asked_for_in_two_ways(command, capsys):
    def helped(*words: str) -> str:
        try:
            assert cli.main(list(words)) == 0
        except SystemExit as stop:
            assert stop.code == 0
        return capsys.readouterr().out

    assert helped("help", command) == helped(command, "--help") != helped("help")


def test_help_of_no_command_is_refused(capsys):
    assert cli.main(["help", "trian"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_help_into_a_closed_pipe_is_silent():
    code = "import sys; from argosy.cli import main; sys.exit(main(['--help']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, "")


@pytest.mark.parametrize("command", ["plan --model llama3-8b --cluster 8xh100 --top 1", "config show ü.toml"])
def test_an_encoding_that_lacks_letters_gets_others_and_no_traceback(command, tmp_path):
    (tmp_path / "ü.toml").write_text('evaluate.sample_prompt = "ü"', encoding="utf-8")
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    words = [sys.executable, "-m", "argosy", *command.split()]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, timeout=PATIENT_S, check=False)
    said = [line for line in done.stderr.splitlines() if not line.endswith(b" s so far)")]  # on a slow machine
    assert (done.returncode, said) == (0, [])
    assert b"##" in done.stdout or b'sample_prompt = "?"' in done.stdout
    assert done.stdout.isascii()
