"""Takes docs/demo.svg: `make demo` in a terminal, as it is while it trains and as it ends. It takes some minutes.

    python docs/site/demo.py [FOLDER]

FOLDER: a clone whose demo has not been run. It needs tmux, which is the terminal.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 96, 30
SHOWN_AT = 0.6
"""Share of the run at which the panel is taken."""
NAME = "argosy-demo"
PICTURE = Path(__file__).parent.parent / "demo.svg"


def tmux(*words: str) -> str:
    return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True).stdout


def screen(*more: str) -> str:
    return tmux("capture-pane", "-e", "-p", "-t", NAME, *more)


def share_done(text: str) -> float:
    """Return the share that the panel's bar says, e.g. in "60%  eta"; 0 without a panel."""
    before, _, rest = Text.from_ansi(text).plain.partition("%  eta")
    return int(before.split()[-1]) / 100 if rest and before.split()[-1].isdigit() else 0.0


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".").absolute()
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "-s", NAME, f"cd {folder} && make demo; sleep 60")
    try:
        while share_done(training := screen()) < SHOWN_AT:
            time.sleep(1)
        while "next:" not in (ended := screen("-S", "-200")):
            time.sleep(1)
    finally:
        tmux("kill-session", "-t", NAME)
    PICTURE.write_text(drawn(training, ended))


def drawn(training: str, ended: str) -> str:
    """Return the picture of two screens, one below the other, which loads nothing from another host."""
    terminal = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for text in ("$ make demo", training.rstrip(), "", ended[ended.rindex("done: ") :].rstrip()):
        terminal.print(Text.from_ansi(text))
    picture = re.sub(r"@font-face \{.*?\}", "", terminal.export_svg(title="make demo"), flags=re.DOTALL)
    return picture.replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    main()
