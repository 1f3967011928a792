"""Commands of the pages on clusters, which are run where there is a cluster of the kind."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from commands import Folder

PAGES = Path(__file__).parent.parent / "docs/clusters"
TEXT = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("argosy", "srun", "sbatch", "ray", "docker", "kubectl")


def commands(page: str) -> list[str]:
    """The commands in the text blocks of a page, in order, without what stands behind #."""
    lines = [
        line.partition("#")[0].strip()
        for block in TEXT.findall((PAGES / page).read_text())
        for line in block.splitlines()
    ]
    return [line for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS]


def try_all(
    page: str, folder: Folder, here: dict[str, str], launch: tuple[str, ...], untried: tuple[str, ...] = ()
) -> None:
    """Run each command of a page as a user would, and assert that it ends well.

    here: text of the page -> what stands for it here; launch: more options of `argosy launch`; untried: programs whose
    commands cannot be run here, which the page has to say.
    """
    found = commands(page)
    assert {line.split()[0] for line in found} <= {"argosy", *untried}, found
    assert [line for line in found if " launch " in line] and [line for line in found if " stop " in line]
    for line in found:
        if line.split()[0] in untried:
            continue
        words = shlex.split(_as_here(line, {"runs/NAME": "runs/tiny", **here}))[1:]
        folder.argosy(*words, *(launch if words[0] == "launch" else ()))


def _as_here(line: str, here: dict[str, str]) -> str:
    for text, instead in here.items():
        line = line.replace(text, instead)
    return line
