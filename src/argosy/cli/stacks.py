"""Show where every process of a run is now: its Python stack, whether it trains or hangs.

The agent on each machine of the run asks its processes, which write their stacks at once and go on; nothing is stopped
or slowed, and nothing needs to be installed. Processes at the same place are shown once, the rarest first. It takes a
second or two. What was found is kept in the run's folder, under stacks.

Examples:
  argosy stacks runs/demo                 of all processes, those at the same place together
  argosy stacks runs/demo --threads       their other threads too
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from argosy.cli.documents import write
from argosy.cli.options import RunPath, parse
from argosy.config.load import load
from argosy.errors import UserError
from argosy.files import atomic_write, open_regular, read_at_most
from argosy.observe.stacks import in_words
from argosy.observe.terminal import printable
from argosy.processes.child import wait_until
from argosy.supervise.stack_gatherer import MOST_ANSWER_BYTES, STACKS_FOLDER, STACKS_REQUEST, NodeStacks
from argosy.sync.layout import SITES

STACKS_LOOK_S = 0.1
KEPT = 20
"""Older answers that stay in the folder."""


@dataclass(frozen=True)
class Options:
    run: RunPath
    threads: bool = False
    """Show the other threads of each process too."""
    json: bool = False
    """Print JSON, a node a line."""
    wait_s: float = 10.0
    """Seconds to wait for the agents."""


def main(argv: list[str]) -> int:
    options = parse(argv, "argosy stacks", Options)
    run_dir = options.run
    nodes = _nodes(run_dir)
    name = f"{int(time.time())}-{uuid.uuid4().hex[:8]}"
    folder = _ask(run_dir, name)
    answers = _answers(folder, nodes, options.wait_s)
    if not answers:
        raise UserError(
            f"{run_dir}: no agent answered within {options.wait_s:g} s. A run in the processes of torchrun has none; a "
            "run on other machines must have this very folder. Try --wait-s 60, or py-spy dump --pid PID there."
        )
    workers = [worker for answer in answers for worker in answer.workers]
    if options.json:
        write("stacks", *answers)
        return 0
    print(printable(in_words(workers, options.threads)) or f"{run_dir}: no worker process runs just now")
    if len(answers) < nodes:
        known = ", ".join(sorted(answer.node for answer in answers))
        print(printable(f"\nonly {len(answers)} of {nodes} nodes answered within {options.wait_s:g} s: {known}"))
    print(f"\nkept in {folder}")
    return 0


def _nodes(run_dir: Path) -> int:
    """Return how many machines hold the run. Raises: UserError if it is no run, or is not being trained."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder. Name the folder of a run that trains, such as runs/demo.")
    if not (run_dir / "run.toml").is_file():
        raise UserError(f"{run_dir}: not a run: it has no run.toml. Name the folder of a run, such as runs/demo.")
    if of_sites := sorted((run_dir / SITES).glob("*/run.toml")):
        raise UserError(
            f"{run_dir}: each of its sites has processes of its own. Name one, such as {of_sites[0].parent}."
        )
    locks = sorted(run_dir.glob(".lock*"))
    if not any(_is_held(lock) for lock in locks):
        raise UserError(f"{run_dir} is not being trained now. Its last events are in {run_dir}/events.")
    return load(str(run_dir / "run.toml")).launch.nodes


def _is_held(lock: Path) -> bool:
    """Return True if a process holds the run's lock; a process on another machine does too, where locks are shared."""
    try:
        with open_regular(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it may not be opened by this user: only the agents can tell
        return True
    return False


def _ask(run_dir: Path, name: str) -> Path:
    """Write the request. Return the folder in which the answers will be. Raises: UserError if it may not be written."""
    folder = run_dir / STACKS_FOLDER / name
    try:
        folder.mkdir(parents=True)
        with atomic_write(run_dir / STACKS_FOLDER / STACKS_REQUEST) as file:
            file.write(json.dumps({"name": name, "time_s": time.time(), "pid": os.getpid()}).encode())
    except OSError as problem:
        raise UserError(
            f"{run_dir / STACKS_FOLDER}: cannot be written ({problem.strerror}). Who may write to a run's folder may "
            "ask for its stacks: ask its owner."
        ) from None
    older = sorted(path for path in (run_dir / STACKS_FOLDER).iterdir() if path.is_dir() and path.name[:1].isdigit())
    for path in older[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    return folder


def _answers(folder: Path, nodes: int, wait_s: float) -> list[NodeStacks]:
    """Return the agents' answers once all are there, or the time is over."""
    wait_until(lambda: len([*folder.glob("*.json")]) >= nodes, wait_s, STACKS_LOOK_S)
    answers = []
    for path in sorted(folder.glob("*.json")):
        try:
            answers.append(TypeAdapter(NodeStacks).validate_json(read_at_most(path, MOST_ANSWER_BYTES)))
        except (OSError, ValidationError, UserError):
            print(printable(f"{path} is no answer of an agent, and is left out"), file=sys.stderr)
    if not answers:
        with suppress(OSError):
            folder.rmdir()
    return answers
