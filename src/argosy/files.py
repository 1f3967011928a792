"""Files that are either whole or not there: written beside their final name, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import pwd
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

from argosy.errors import StorageError, UserError

PARTIAL = ".partial"
"""Suffix of a file that is being written. Nothing reads such a file; what a kill left, the next write replaces."""

RUN_LOCK = ".lock"
"""File in a run's folder that the process that holds it has locked; with a node's name behind it, on several."""
LOCK_TRIES, LOCK_TRY_S = 5, 0.02

OTHERS_WRITE = 0o022
"""The permission bits that let others than the owner write."""

FILE_COPY_BYTES = 64 * 2**20
"""Bytes of a large file that are copied at once."""

CHAINED = ("zip", "tar", "libarchive", "simplecache", "filecache", "blockcache", "cached", "dir", "reference")
"""File systems of fsspec in others, to which :: leads: zip://*.txt::s3://bucket/texts.zip."""

LONGEST_NAME_BYTES = 240
"""Length of a file's name that is given from outside: file systems take 255 bytes, suffixes included."""


class PartialFile:
    """A file that is being written: `path` changes with `commit`, and not with `abandon`. One writer at a time."""

    def __init__(self, path: Path):
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL)
        self.file: BinaryIO = self._partial.open("wb")
        """The file to write to."""

    def commit(self) -> None:
        """Give the file its name, in place of an older one; on return both file and name are on the disk."""
        sync(self.file)
        self.file.close()
        self._partial.replace(self._path)
        sync_folder(self._path.parent)

    def abandon(self) -> None:
        """Remove what was written so far."""
        with suppress(OSError):  # a full disk refuses the last bytes, which are not needed
            self.file.close()
        self._partial.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for writing; when the block ends without an error, the file has its name and is on the disk.

    After an error in the block, `path` is what it was before: the older file, or none.
    """
    partial = PartialFile(path)
    try:
        yield partial.file
        partial.commit()
    except BaseException:
        partial.abandon()
        raise


def write_unsynced(path: Path, *data: bytes, by: str = "") -> None:
    """Write a small file beside its name, then rename it: it is whole or not there, but after a power cut.

    by: tells writers apart that may write the same file at once. Raises: OSError.
    """
    partial = path.with_name(f"{path.name}.{by}.new" if by else f"{path.name}.new")
    try:
        with partial.open("wb") as file:
            file.writelines(data)
    except OSError:
        partial.unlink(missing_ok=True)  # on a full disk, so that there is room to say so
        raise
    partial.replace(path)


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in place of ~; that of an unknown user stays as it is, and leads nowhere."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  - Path.expanduser raises RuntimeError


def fsspec_place(place: str) -> tuple[Any, str]:
    """Return the file system of a path or URL that fsspec knows, and the path in it. Raises: as `url_to_fs`."""
    from fsspec.core import url_to_fs

    if place.partition("::")[0].partition("://")[0] in CHAINED:
        return url_to_fs(place)
    fs, path = url_to_fs(place.replace("::", "\0"))  # two colons in a name, and no chain
    return fs, path.replace("\0", "::")


def make_folder(path: Path) -> None:
    """Make the folder `path` and those above it, where they are missing; on return their names are on the disk.

    For each folder that is to hold what must survive a power cut: a file that is synced is lost with its folder's name.
    Raises: OSError.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


@dataclass
class MadeFolder:
    """A folder to write in. Set `is_kept` once it holds something that is worth keeping, or somebody else's."""

    is_kept: bool = False


@contextmanager
def made_folder(path: Path) -> Iterator[MadeFolder]:
    """Make the folder `path`, and those above it. After a UserError in the block, which says that nothing was written,
    make that true: if the folder was missing or empty and is not to be kept, remove what is new.

    Raises: OSError if it cannot be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    folder = MadeFolder(is_kept=path.exists() and any(path.iterdir()))
    try:
        make_folder(path)
        yield folder
    except UserError:
        if not folder.is_kept:
            _clear(path, missing)
        raise


def _clear(folder: Path, missing: Sequence[Path]) -> None:
    """Remove all that is in `folder`, and the folders that were `missing`, if nothing else is in them."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
    for made in missing:
        with suppress(OSError):
            made.rmdir()


def lock_or_holder(file: TextIO) -> str | None:
    """Lock an open file for this process and write its number there, and its machine; return None.

    If another process holds it, return that one's number as text. The kernel releases the lock when the process dies.
    """
    for _ in range(LOCK_TRIES):  # `is_abandoned` and `is_locked` hold it for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(LOCK_TRY_S)
    else:
        file.seek(0)
        return (file.read().split() or ["unknown"])[0]
    file.truncate(0)
    file.write(f"{os.getpid()}\n{boot_id()}\n")
    file.flush()
    return None


def is_locked(path: Path) -> bool:
    """Return True if a process holds this lock (`lock_or_holder`). Raises: OSError."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holder_here(locks: Iterable[Path]) -> str | None:
    """Return the number, as text, of a process of this machine that holds one of these locks; None if there is none."""
    for path in locks:
        with suppress(OSError):
            if is_locked(path) and (held := path.read_text().split())[1:] == [boot_id()]:
                return held[0]
    return None


def is_abandoned(path: Path) -> bool:
    """Return True if a process of this machine had this lock (`lock_or_holder`), and none has it now.

    A lock of another machine, or from before this one was started, tells nothing: it may not be seen from here.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if file.read(200).split()[1:] != [boot_id().encode()]:
                return False
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is held, or may not be read
        return False
    return True


def boot_id() -> str:
    """Return what tells this machine, since it was started, from others; empty if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def kept_text(path: Path, make: Callable[[], str], mode: int = 0o666, most_chars: int = -1) -> str:
    """Return the first `most_chars` characters of a small file; the first caller writes it, with what `make` returns.

    Processes, of other machines too, may call this at the same time, and get the same. `mode`: permissions of a new
    file. Raises: OSError; ValueError if the file holds no text.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another may be about to write it
        text = file.read(most_chars)
        if not text.strip():
            text = make()
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return text


def append_whole(file: FileIO, data: bytes) -> None:
    """Append `data` to an unbuffered file, all or nothing: a disk that becomes full takes a part. Raises: OSError."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        file.truncate(end)
        raise


def sync(file: BinaryIO) -> None:
    """Wait until what was written to `file` is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder`, or a file's bytes, are on the disk: only then a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sized_file(path: Path, size: int) -> None:
    """Give a file, made if there is none, `size` bytes of the disk, so that a map of it can be written to: where the
    room is found missing only then, that is a SIGBUS. Raises: StorageError if there is none.
    """
    try:
        with path.open("ab") as file:
            file.truncate(size)
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as problem:
        raise StorageError(
            f"{path} could not be written ({problem}). Free some space, and run the same command again to go on."
        ) from None


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a folder of what the block writes into the one that it is given; even a power cut leaves all or nothing.

    Raises: StorageError if it cannot be written.
    """
    partial = folder.absolute().with_name(f".{folder.name}{PARTIAL}")  # a sibling: the rename stays on one file system
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_folder(partial)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            sync_folder(path)
        partial.rename(folder)
        sync_folder(folder.absolute().parent)
    except OSError as problem:
        raise StorageError(
            f"{folder} could not be written ({problem}). Free some space or get the right to write there, or choose "
            "another folder."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def state_folder() -> Path:
    """Return Argosy's folder for what it keeps for this user, in $XDG_STATE_HOME or ~/.local/state; it may be missing.

    Raises: RuntimeError if the user has no home.
    """
    states = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (states if states.is_absolute() else Path.home() / ".local" / "state") / "argosy"


def read_with_owner(path: Path, most_bytes: int) -> tuple[bytes, str]:
    """Return a file's first `most_bytes`, and whose it is: "" if nobody but this user can have written it.

    Nothing is followed or waited for: what is no plain file (a link, a pipe) is refused. Raises: OSError.
    """
    with open_regular(path, follow=False) as file:
        found = os.fstat(file.fileno())
        whose = "" if found.st_uid == os.geteuid() else _name_of_user(found.st_uid)
        if not whose and found.st_mode & OTHERS_WRITE:
            whose = f"others too, who may write it (mode {found.st_mode & 0o777:04o}; chmod go-w {path.name})"
        return file.read(most_bytes), whose


def _name_of_user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def is_plain_name(name: str) -> bool:
    """True if `name` can be that of a file in a given folder, and leads nowhere else.

    For names that come from outside: a manifest, an index, a bucket.
    """
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and name.isprintable()
        and len(os.fsencode(name)) <= LONGEST_NAME_BYTES
    )


def open_regular(path: Path | str, folder: int | None = None, *, follow: bool = True) -> BufferedReader:
    """Open a regular file for reading, in a place where others may put something else under its name.

    A pipe would hold its reader for ever, a device has no end. folder: descriptor of the folder that `path` is in.
    follow: False refuses a link. Raises: OSError.
    """
    links = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_at_most(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file that comes from outside. Raises: UserError if it has more bytes; OSError."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise UserError(f"{path} has more than {most_bytes >> 20} MiB: it is not what its name says. Get it again.")
    return data


def json_of(data: str | bytes) -> Any:
    """Return the value of JSON that comes from outside. Raises: ValueError, also if it is nested too deep."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def text_at_end(path: Path, most_bytes: int) -> str:
    """Return the last bytes of a file as text; its first character may be cut. Raises: OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read(most_bytes).decode(errors="replace")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal. Raises: OSError, also if it is not a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class RegularFile:
    """A file whose ranges are read: mapped into memory, of which nothing stays when a range was copied out.

    It keeps a descriptor until `close`. A context manager.
    """

    def __init__(self, path: Path):
        """Raises: OSError, also if it is not a regular file."""
        with open_regular(path) as file:
            self.size = os.fstat(file.fileno()).st_size
            self._pages = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start` on, which must be there."""
        for done in range(0, len(buffer), FILE_COPY_BYTES):
            first, some = start + done, buffer[done : done + FILE_COPY_BYTES]
            assert self._pages is not None and first + len(some) <= self.size
            some[:] = memoryview(self._pages)[first : first + len(some)]
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            self._pages.madvise(mmap.MADV_DONTNEED, page, first + len(some) - page)

    def close(self) -> None:
        """Let go of the file."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()
