"""Python stacks: of a process, which writes them down when another asks, even while it hangs; of many ranks, grouped,
so that a person sees at once which of them is elsewhere.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

ASKED = signal.SIGUSR2
WRITING_S = 0.05
"""A process that is not stopped has written its stacks within this time."""


def write_when_asked(descriptor: int) -> None:
    """Prepare this process to write the stacks of all its threads to the file with this descriptor when asked."""
    faulthandler.register(ASKED, os.dup(descriptor), all_threads=True)


def ask(pid: int, wait_s: float = WRITING_S) -> None:
    """Ask a process that has called `write_when_asked`, and wait until it had the time. It would kill any other."""
    with suppress(ProcessLookupError):
        os.kill(pid, ASKED)
        time.sleep(wait_s)


STACK_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
HEAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
PATH_ENDS = ("/site-packages/", "/src/", "/lib/")
"""A file is named from behind the last of these on."""
MAIN = "argosy/supervise/worker.py"
"""A frame of the main thread."""
Frame = tuple[str, str, str]
"""File, line and function."""
Seen = Mapping[str, Any]
"""A worker, as an agent wrote it down."""


def threads_of(text: str) -> list[list[Frame]]:
    """Return the threads of a faulthandler dump, the innermost frame first, the main thread first."""
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if HEAD.match(line):
            threads.append([])
        elif (found := STACK_FRAME.match(line)) and threads:
            threads[-1].append((_short(found["file"]), found["line"], found["name"]))
    threads = [_without_start(frames) for frames in threads]
    return sorted(threads, key=lambda frames: not any(MAIN in file and name == "main" for file, _, name in frames))


def _without_start(frames: list[Frame]) -> list[Frame]:
    """Return the frames within the worker's main function: below it all are alike."""
    ends = (at for at, (file, _, name) in enumerate(frames) if MAIN in file and name == "main")
    return frames[: next(ends, len(frames)) + 1]


def groups(workers: Iterable[Seen]) -> list[tuple[list[Seen], list[Frame], str]]:
    """Return workers that are at the same place together, with its frames and what is wrong; the rarest first."""
    found: dict[tuple[Any, ...], list[Seen]] = defaultdict(list)
    for worker in workers:
        frames = next(iter(threads_of(worker.get("stack", ""))), [])
        found[tuple(frames), worker.get("problem", "")].append(worker)
    return [
        (some, list(frames), problem)
        for (frames, problem), some in sorted(found.items(), key=lambda pair: (len(pair[1]), _rank(pair[1][0])))
    ]


def in_words(workers: Sequence[Seen], is_all: bool = False) -> str:
    """Return the stacks for a person, each once with the ranks that are there; is_all: of all their threads."""
    lines = [*_behind(workers)]
    for some, frames, problem in groups(workers):
        lines += ["", f"{_names(some)}: {_phase(some)}"]
        if problem:
            lines.append(f"  {problem}")
        lines += [f"  {name:32} {file}:{line}" for file, line, name in frames]
        if is_all:
            lines += [
                f"  another thread: {name:16} {file}:{line}"
                for thread in threads_of(some[0].get("stack", ""))[1:]
                for file, line, name in thread[:1]
            ]
    return "\n".join(lines).lstrip("\n")


def _behind(workers: Iterable[Seen]) -> Iterable[str]:
    """Yield the ranks that are behind, for each process group whose ranks are not at the same collective."""
    begun: dict[str, dict[int, int]] = defaultdict(dict)
    for worker in workers:
        for group, number in worker.get("collectives", {}).items():
            if worker.get("rank") is not None:
                begun[group][worker["rank"]] = number
    for group, ranks in sorted(begun.items()):
        most = max(ranks.values())
        behind = sorted(rank for rank, number in ranks.items() if number < most)
        if behind:
            fewest = min(ranks.values())
            yield (
                f"{group}: {_list(behind)} {'has' if len(behind) == 1 else 'have'} begun {most - fewest} collective"
                f"{'' if most - fewest == 1 else 's'} fewer than the others ({fewest} of {most})"
            )


def _phase(some: Sequence[Seen]) -> str:
    phases = Counter((worker.get("phase", "?"), worker.get("step", -1)) for worker in some)
    (phase, step), _ = phases.most_common(1)[0]
    longest = max((worker.get("phase_s", 0.0) for worker in some), default=0.0)
    return f"step {step}, {phase} for {longest:.1f} s" if step >= 0 else f"{phase} for {longest:.1f} s"


def _names(some: Sequence[Seen]) -> str:
    ranks = sorted(worker["rank"] for worker in some if worker.get("rank") is not None)
    others = [f"process {worker['pid']}" for worker in some if worker.get("rank") is None]
    return ", ".join([*([_list(ranks)] if ranks else []), *others])


def _list(ranks: Sequence[int]) -> str:
    """Return e.g. "ranks 0-6, 9"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank, rank])
    words = ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"


def _rank(worker: Seen) -> int:
    rank = worker.get("rank")
    return -1 if rank is None else int(rank)


def _short(file: str) -> str:
    for end in PATH_ENDS:
        file = file.rpartition(end)[2]
    return file
