"""A terminal in memory, as far as Argosy uses one: what was written to it, as a person sees it."""

from __future__ import annotations

import re

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class Emulator:
    """Lines that scroll out of the screen are kept. Raises: ValueError for a control sequence that leaves state."""

    def __init__(self, columns: int = 80, rows: int = 24):
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        """Write `text`; a newline also returns the cursor, as terminals' line discipline makes it."""
        for found in TOKEN.finditer(text):
            if found[2] is not None:
                self._control(found[1], found[2])
            elif found[0] == "\r":
                self.column = 0
            elif found[0] == "\n":
                self._down()
            else:
                self._put(found[0])

    @property
    def screen(self) -> list[str]:
        """The rows that are to be seen, without the empty ones at the end."""
        shown = [line.rstrip() for line in self.lines[-self.rows :]]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def resize(self, columns: int) -> None:
        """Become narrower or wider: long lines are broken anew, the cursor stays behind the same text."""
        before = [line.rstrip() for line in self.lines]
        self.lines, self.columns = [], columns
        for at, line in enumerate(before):
            if at == self.row:
                self.row = len(self.lines)
            self.lines += [line[start : start + columns] for start in range(0, max(1, len(line)), columns)]

    def _put(self, character: str) -> None:
        if self.column == self.columns:
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")

    def _control(self, numbers: str, kind: str) -> None:
        if kind == "A":
            self.row = max(0, len(self.lines) - self.rows, self.row - int(numbers or 1))
        elif kind == "K" and numbers == "2":
            self.lines[self.row] = ""
        elif kind == "K":
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif kind == "J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            del self.lines[self.row + 1 :]
        elif kind != "m":
            raise ValueError(f"\\x1b[{numbers}{kind}")
