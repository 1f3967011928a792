"""Claims: numbers that are taken in order, each by one process at most, as files of one folder.

A claim is *open* from the moment it is taken until a later number is. All of it is safe with processes that stand still
at any point and for any time, and with several machines on one NFS:

- Taking a number is an exclusive create (O_EXCL), which the file's server decides, NFS from version 3 on.
- Closing a claim changes its content. Opening a file asks the server whether it has changed (close-to-open), so that
  a process on another machine that looks at its own claim sees it at once; a listing of names may be a minute old.
- Creating a file makes a client forget its listing of that folder, so the listing after it is new.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from argosy.files import make_folder, sync_folder

CLOSED = b"closed\n"
"""Content of a claim below which all are closed too."""


class Taken(Exception):
    """Another process has taken this number, or a later one."""


class Claims:
    """The claims in one folder, which exists from the first one on."""

    def __init__(self, folder: Path):
        self._folder = folder

    def newest(self) -> int:
        """Return the highest number that was taken; 0 if none was. It may be closed. Raises: OSError."""
        return max(self._numbers(), default=0)

    def owner(self, number: int) -> str:
        """Return the owner of an open claim; "" if it is closed, given up, being taken or free. Raises: OSError."""
        try:
            content = self._path(number).read_bytes()
        except FileNotFoundError:
            return ""
        return "" if content == CLOSED else content.decode(errors="replace")

    def is_taken(self, number: int) -> bool:
        """True if somebody took the number, also if its claim is closed. Raises: OSError."""
        return self._path(number).exists()

    def take(self, number: int, owner: str) -> None:
        """Take a number for `owner`, which is not empty, and close all lower ones; then all that is on the disk.

        Return at once if this owner has it already. Raises: Taken; OSError.
        """
        make_folder(self._folder)
        try:
            descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            if self.owner(number) != owner:
                raise Taken(f"{number} was taken by another process") from None
        else:
            _write(descriptor, owner.encode())
            sync_folder(self._folder)
        # Whoever stood still on the way here while others went on finds out now. Had it been the create, its number
        # is one that nobody may use; had it been the write, that opened a claim which others had closed.
        if (newest := self.newest()) > number:
            self.give_up(number)
            raise Taken(f"{newest} was taken before {number}")
        self._close_below(number)

    def give_up(self, number: int) -> None:
        """Take the owner's name off a claim; its number stays taken. Raises: OSError."""
        self._replace(number, b"")

    def _close_below(self, number: int) -> None:
        """Close all claims below `number` that are not closed.

        The lowest is closed first: so those that are not closed come last, also if this process is killed meanwhile.
        """
        left = []
        for lower in sorted((n for n in self._numbers() if n < number), reverse=True):
            if self._path(lower).read_bytes() == CLOSED:
                break
            left.append(lower)
        for lower in reversed(left):
            self._replace(lower, CLOSED)

    def _replace(self, number: int, content: bytes) -> None:
        with suppress(FileNotFoundError):
            _write(os.open(self._path(number), os.O_WRONLY), content)

    def _numbers(self) -> list[int]:
        try:
            return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except FileNotFoundError:
            return []

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}"


def _write(descriptor: int, content: bytes) -> None:
    """Replace a file's content by way of none, put it on the disk, and close the descriptor."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
