"""The `argosy` command: find the command's module, run it, and turn errors into exit codes.

Nothing heavy is imported here: `argosy --help` answers at once.
"""

from __future__ import annotations

import codecs
import gc
import io
import os
import sys
import traceback
import warnings
from importlib import import_module
from shutil import get_terminal_size
from textwrap import fill
from types import ModuleType
from typing import Any, TextIO

COMMAND_GROUPS = {
    "train": {
        "prepare": "turn text, JSONL or Parquet into token shards",
        "train": "train a model; without a run file, the built-in demo",
        "launch": "train in the background: on this machine, on hosts or on a cluster",
        "stop": "have a launched run save its state and end",
        "sweep": "train many runs that differ in some keys, and find the best",
    },
    "see runs": {
        "runs": "list runs, with their states and last steps",
        "status": "say in a few lines how a run is, and what to do next",
        "watch": "show runs in a web page or in the terminal, live or afterwards",
        "metrics": "print a run's metrics by step, as CSV, JSON or Parquet",
        "logs": "print the output of a launched run",
        "stacks": "show where every process of a run that trains, or hangs, is now",
        "compare": "compare two runs: settings, and losses at equal cost",
    },
    "use a model": {
        "generate": "continue a text with a checkpoint",
        "chat": "talk with a model in the terminal",
        "serve": "serve a model by OpenAI's API, to try it",
        "evaluate": "measure a checkpoint: loss on held-out text, or scores on tasks",
        "checkpoint": "list, verify, export, import and prune checkpoints",
    },
    "plan and predict": {
        "plan": "rank layouts for a model on a cluster: time, memory, cost, and why",
        "probe": "measure this machine, and write it as a cluster to plan for",
        "simulate": "run the train step of any rank without devices",
        "design": "sweep devices that do not exist yet, for training and serving",
        "scaling": "fit a scaling law to small runs, and predict larger ones",
    },
    "verify": {
        "parity": "check that a plan computes what one process computes",
        "replay": "run steps again, and compare them bit for bit",
        "chaos": "train with and without injected faults, and compare",
    },
    "reference": {
        "config": "show the resolved run file, its JSON schema, the presets",
        "docs": "print the manual of this version, or the skill for coding agents",
    },
}
"""Heading in the help -> command -> its purpose, in a line."""
COMMANDS = {name: purpose for group in COMMAND_GROUPS.values() for name, purpose in group.items()}
"""Command -> its purpose; its module is argosy.cli.COMMAND, with `main(argv) -> int | None`."""

WHEN_STOPPED = {
    "prepare": "The same command goes on from the last whole shard.",
    "train": "What was prepared or saved is kept; the same command goes on from there.",
}
"""Command -> what it does next after Ctrl-C. A run that trains says that itself, since it has a state to save."""

LETTERS = {"█": "#", "…": "...", "–": "-"}
"""Signs that are printed -> what stands for them in an encoding that lacks them."""
IN_LETTERS = "argosy-letters"
BROKEN_PIPE = 128 + 13
COMMIT_DIGITS = 8


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: `argosy.errors.EXIT_CODES`."""
    _open_what_is_closed()
    _replace_what_has_no_letter()
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # the reader (head, less) has seen enough; Python must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _open_what_is_closed() -> None:
    """Let a standard stream that was closed (`>&-`) lead to /dev/null: a file or socket would take its number."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def _replace_what_has_no_letter() -> None:
    """Have output in an encoding other than UTF-8 (`LC_ALL=C`) show what it lacks in other letters."""
    codecs.register_error(IN_LETTERS, lambda error: (_in_letters(error), getattr(error, "end", 0)))
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    for stream in streams:
        if codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors=IN_LETTERS)
            os.environ.setdefault("PYTHONIOENCODING", ":replace")  # of child processes


def _in_letters(error: UnicodeError) -> str:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(LETTERS.get(sign, "?") for sign in error.object[error.start : error.end])


def _main(argv: list[str]) -> int:
    if argv[:1] == ["help"] and argv[1:]:
        argv = [*argv[1:], "--help"]
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(_help(), flush=True)
        return 0
    if name == "--version":
        print(_version())
        return 0
    if "--json" not in argv:
        return _run(name, argv[1:])
    from argosy.cli.documents import documents_on_stdout

    with documents_on_stdout():
        return _run(name, argv[1:])


def _version() -> str:
    """Return the version, with the commit that it was built from, and those of torch and Python."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from argosy import __version__

    commit = _commit()
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return f"argosy {__version__}{commit and f' ({commit})'}, torch {torch}, Python {platform.python_version()}"


def _commit() -> str:
    """Return the commit of this checkout or package, shortened; empty if nothing says it."""
    import json
    import subprocess
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    source = Path(__file__).parents[3]
    if (source / ".git").exists():
        git = ["git", "-C", str(source), "describe", "--always", f"--abbrev={COMMIT_DIGITS}", "--dirty", "--exclude=*"]
        with suppress(OSError):
            return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    commit = (Path(__file__).parents[1] / "COMMIT").read_text(encoding="utf-8").strip()
    if commit.startswith("$"):  # it was not built from a `git archive`: pip may have cloned it, and then says what
        commit = ""
        with suppress(PackageNotFoundError):
            origin = json.loads(distribution("argosy").read_text("direct_url.json") or "{}")
            commit = origin.get("vcs_info", {}).get("commit_id", "")
    return commit[:COMMIT_DIGITS]


def _run(name: str, argv: list[str]) -> int:
    from dataclasses import replace

    from argosy.credentials import redact
    from argosy.errors import ArgosyError, ArgosyWarning, ErrorDocument, UserError, near_names, record_of_error
    from argosy.observe.terminal import print_message, printable

    def tell(record: ErrorDocument) -> int:
        if "--json" in (name, *argv):
            from argosy.cli.documents import write

            texts: dict[str, Any] = {
                key: printable(value) for key, value in vars(record).items() if isinstance(value, str)
            }
            write("error", replace(record, **texts))  # it may quote a file
        return record.exit_code

    warnings.simplefilter("default", ArgosyWarning)  # each text once
    warnings.showwarning = _show_warning
    try:
        if name not in COMMANDS:
            raise UserError(f"no command {name!r}; {near_names(name, COMMANDS, 1)}")
        code = _imported(f"argosy.cli.{name}").main(argv)
        sys.stdout.flush()
        return int(code or 0)
    except ArgosyError as error:
        if os.environ.get("ARGOSY_DEBUG") == "1":
            print(redact(traceback.format_exc()), end="", file=sys.stderr)
        print_message(f"argosy: {error}")
        return tell(record_of_error(error))
    except KeyboardInterrupt:
        said = f"argosy {name}: stopped. {WHEN_STOPPED.get(name, 'The same command starts again.')}"
        print_message(said)
        return tell(ErrorDocument(said, 130))
    except BrokenPipeError:
        raise
    except Exception as bug:
        tell(ErrorDocument(redact(f"{type(bug).__name__}: {bug}"), 1))
        raise


def _imported(module: str) -> ModuleType:
    """Import a command's module, and leave what is there then out of all garbage collections.

    They took a fifth of a short command's time: while it imports, and when it ends.
    """
    if module in sys.modules:  # this process does more than one command
        return import_module(module)
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning; one of ours is a sentence for the user, any other keeps its place in the source."""
    from argosy.errors import ArgosyWarning
    from argosy.observe.terminal import print_message

    where = "" if issubclass(category, ArgosyWarning) else f"{filename}:{lineno}: "
    print_message(f"argosy: warning: {where}{message}")


def _help() -> str:
    from argosy.errors import EXIT_CODES

    width = max(map(len, COMMANDS))
    table = "\n\n".join(
        "\n".join([f"{group}:", *(f"  {name:{width}}  {purpose}" for name, purpose in commands.items())])
        for group, commands in COMMAND_GROUPS.items()
    )
    columns = get_terminal_size().columns
    codes = "\n".join(
        fill(f"  {code:>3}  {meaning}", columns, subsequent_indent=" " * 7) for code, meaning in EXIT_CODES.items()
    )
    return f"""\
usage: argosy COMMAND [RUN] [--section.key VALUE ...]

Trains large language models on one machine or many; plans for any number.

{table}

RUN is a run file (TOML) or the name of a run preset. Its keys are options too.

examples:
  argosy train                                 the built-in demo, some minutes
  argosy train run.toml --optimizer.lr 1e-3    a run of your own, a key changed
  argosy config show run.toml                  every key of that run, explained
  argosy help COMMAND                          its purpose and options

exit codes:
{codes}"""
