"""The fence: only processes of the newest generation of a run commit checkpoints, and an older one's find that out.

Each generation writes in folders of its own name. When the next one begins, these lose their names: so a process that
has just asked `check_generation`, and stood still since, has nothing to commit when it wakes.

Generations are numbered by claims: numbers that are taken in order, each by one process at most, as files of one
folder. A claim is *open* from the moment it is taken until a later number is. All of it is safe with processes that
stand still at any point and for any time, and with several machines on one NFS:

- Taking a number is an exclusive create (O_EXCL), which the file's server decides, NFS from version 3 on.
- Closing a claim changes its content. Opening a file asks the server whether it has changed (close-to-open), so that
  a process on another machine that looks at its own claim sees it at once; a listing of names may be a minute old.
- Creating a file makes a client forget its listing of that folder, so the listing after it is new.

A folder's owner, here and in another place, is a name that the run's folder keeps under every path. It tells nodes of
different runs apart, and runs of one name that copy their checkpoints to one place.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.checkpoint.checksums import RECORD_BYTES, checked, signed
from argosy.errors import ArgosyError, UserError
from argosy.files import PARTIAL, atomic_write, kept_text, make_folder, sync_folder

CLAIMS = ".generations"
"""Folder in the run's folder: the claims of its generations, of which the newest is in force."""
GENERATION_VARIABLE = "ARGOSY_GENERATION"
"""Environment variable: the generation that a process belongs to."""
GONE_ENDING = ".gone"
"""Ends the names of folders that have lost theirs; they are deleted later."""
OLD_NAME = "epoch"
"""Name of a generation in the folders of older runs, which go on."""
OLD_FILES = (".generation", f".{OLD_NAME}")
"""Files in the folders of older runs: the number of the newest generation."""
_PARTIAL = re.compile(rf"step-([0-9]{{8,15}})\.(?:generation|{OLD_NAME})-([0-9]{{4,15}})" + re.escape(PARTIAL))


class Fenced(ArgosyError):
    """The run has gone on without this process: a later generation has begun, and this one must not write."""


def own_generation() -> int:
    """Return the generation that this process belongs to; 0 where generations are not counted."""
    return int(os.environ.get(GENERATION_VARIABLE, "0"))


def newest_generation(run_dir: Path) -> int:
    """Return the newest generation of a run, which may be over; 0 if none has begun."""
    return max(_claims(run_dir).newest(), *(_number_in(run_dir / name) for name in OLD_FILES))


def begin_generation(run_dir: Path, generation: int, owner: str = "") -> None:
    """Let only processes of `generation` commit checkpoints from now on; folders of older ones lose their names.

    owner: who begins it, for a caller that may do so again after an error; empty: nobody else, and only once.
    Raises: Fenced if another has begun it, or a later one.
    """
    for name in OLD_FILES:
        if (path := run_dir / name).exists():  # a process of an older version that was cut off looks at it
            if _number_in(path) > generation:
                raise Fenced(f"{path}: generation {_number_in(path)} has begun, so {generation} cannot")
            with atomic_write(path) as file:
                file.write(f"{generation}\n".encode())
    claims = _claims(run_dir)
    try:
        claims.take(generation, owner or uuid.uuid4().hex)
    except NumberTaken:
        raise Fenced(f"generation {claims.newest()} of {run_dir} has begun, so {generation} cannot") from None
    for folder, _, theirs in partial_folders(run_dir):
        if theirs < generation:
            with suppress(OSError):  # it has just been committed, or deleted
                take_name(folder)


def check_generation(run_dir: Path, generation: int) -> None:
    """Raises: Fenced if a generation after `generation` has begun in `run_dir`, or if that cannot be told."""
    claims = _claims(run_dir)
    try:
        if generation and claims.owner(generation):
            return  # its claim is open: no other has begun
        newest = newest_generation(run_dir)
        if generation and claims.is_taken(generation):
            newest = max(newest, generation + 1)  # it is closed, whatever an old listing of names says
    except (OSError, ValueError) as error:
        raise Fenced(f"{run_dir}: its newest generation cannot be read ({error}), so nothing is written") from None
    if newest > generation:
        raise Fenced(
            f"generation {newest} of {run_dir} has begun, and this process is of generation {generation}: it writes "
            "nothing"
        )


def is_in_force(run_dir: Path, generation: int) -> bool:
    """True if `check_generation` raises nothing."""
    try:
        check_generation(run_dir, generation)
    except Fenced:
        return False
    return True


def partial_folder(run_dir: Path, step: int, generation: int) -> Path:
    """Return the folder in which the processes of `generation` write the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step-{step:08d}.generation-{generation:04d}{PARTIAL}"


def partial_folders(run_dir: Path) -> list[tuple[Path, int, int]]:
    """Return the folders of unfinished checkpoints, each with its step and generation."""
    folders = (run_dir / "checkpoints").glob(f"step-*{PARTIAL}")
    return [(folder, int(m[1]), int(m[2])) for folder in folders if (m := _PARTIAL.fullmatch(folder.name))]


def take_name(folder: Path) -> Path:
    """Rename a folder at once, whatever is in it, such that nothing finds it any more. Returns where it is then."""
    gone = folder.with_name(folder.name + GONE_ENDING)
    shutil.rmtree(gone, ignore_errors=True)
    return folder.rename(gone)


def _claims(run_dir: Path) -> Claims:
    return Claims(run_dir / CLAIMS)


def _number_in(path: Path) -> int:
    """Return the number that a file holds; 0 if there is no such file. Raises: OSError; ValueError."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0


CLOSED = b"closed\n"
"""Content of a claim below which all are closed too."""


class NumberTaken(Exception):
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

        Return at once if this owner has it already. Raises: NumberTaken; OSError.
        """
        make_folder(self._folder)
        try:
            descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            if self.owner(number) != owner:
                raise NumberTaken(f"{number} was taken by another process") from None
        else:
            _write(descriptor, owner.encode())
            sync_folder(self._folder)
        # Whoever stood still on the way here while others went on finds out now. Had it been the create, its number
        # is one that nobody may use; had it been the write, that opened a claim which others had closed.
        if (newest := self.newest()) > number:
            self.give_up(number)
            raise NumberTaken(f"{newest} was taken before {number}")
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


NAME_FILE = ".name"
"""File in the run's folder."""
OWNER = "owner.json"
"""File beside the copies of a run's checkpoints."""
LONGEST_NAME = 64
"""Letters of a name."""
BUCKETS = {"s3", "gs", "az", "abfs", "adl", "oss", "oci", "tos", "obs"}
"""fsspec's names of object stores, which have no folders: there, making one may make its bucket."""
NO_EXCLUSIVE = (FileExistsError, NotImplementedError, TypeError, ValueError)
"""Errors of a file system that does not know the mode "xb"; or has the file, which stays empty: its writer has died."""
NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a store without conditional writes."""
WRITE_S = 2.0
"""Longest wait for a file that is empty: another process has just created it."""


def name_of(run_dir: Path) -> str:
    """Return a name that no other folder has; it is made up at the first call and kept in the folder.

    Raises: UserError if what the folder has is no name.
    """
    name = kept_text(run_dir / NAME_FILE, lambda: uuid.uuid4().hex, most_chars=LONGEST_NAME + 2).strip()
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise UserError(
            f"{run_dir / NAME_FILE}: must hold at most {LONGEST_NAME} letters. Delete it to have it made anew."
        )
    return name


def claim(fs: Any, folder: str, run_dir: Path) -> None:
    """Make `folder` of the fsspec file system `fs` that of the run in `run_dir`, unless it is that of another run.

    Of two runs that claim it at the same moment one is refused if the file system can create a file exclusively (mode
    "xb" of fsspec's `open`: disks, and stores with conditional writes). Elsewhere the one that writes last has it, and
    the other is refused when it asks again, which it does before each copy.

    Raises: UserError if it is that of another run, or its owner.json is something else.
    """
    path, name = f"{folder}/{OWNER}", name_of(run_dir)
    owner = _owner(fs, path)
    if owner is None:
        make_remote_folder(fs, folder)
        data = signed({"run": name})
        try:
            with fs.open(path, "xb") as file:
                file.write(data)
        except Exception as problem:  # of whichever file system: stores say in many ways that the file is there
            if _owner(fs, path) is None:
                if not isinstance(problem, NO_EXCLUSIVE) and getattr(problem, "errno", None) not in NOT_SUPPORTED:
                    raise
                fs.pipe_file(path, data)
        owner = _owner(fs, path)
    if owner != name:
        raise UserError(
            f"{path}: the checkpoints there are of another run of this name (its folder's {NAME_FILE} holds {owner}, "
            f"that of {run_dir} holds {name}). Give this run another name with --name, or another checkpoint.remote. "
            f"To go on with that run in this folder, which must have no checkpoints of its own, first give: "
            f"mkdir -p {shlex.quote(str(run_dir))}; echo {shlex.quote(owner or '')} > "
            f"{shlex.quote(str(run_dir / NAME_FILE))}"
        )


def is_owner(fs: Any, folder: str, run_dir: Path) -> bool:
    """Return True if `folder` of the fsspec file system `fs` is claimed by the run in `run_dir`."""
    return _owner(fs, f"{folder}/{OWNER}") == name_of(run_dir)


def make_remote_folder(fs: Any, folder: str) -> None:
    """Make `folder` of the fsspec file system `fs`, unless that is an object store: a bucket is the user's to make."""
    if not BUCKETS.intersection([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol):
        fs.makedirs(folder, exist_ok=True)


def _owner(fs: Any, path: str) -> str | None:
    """Return the name in the owner's file; None if there is no such file, or it stays empty."""
    until_s = time.monotonic() + WRITE_S
    while True:
        fs.invalidate_cache()
        try:
            data = fs.cat_file(path, start=0, end=RECORD_BYTES + 1)
        except FileNotFoundError:
            return None
        if data:
            break
        if time.monotonic() > until_s:
            return None
        time.sleep(0.05)
    name = checked(data, path).get("run")
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise UserError(f"{path}: names no run. Move it away if the checkpoints beside it are of this run.")
    return name
