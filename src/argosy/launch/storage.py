"""The storage of a run's folder: what a run relies on there is tried before anything is trained.

Two things hold a run together there: a lock that one process has at a time and that ends with it (`flock`), and folders
that get their name at once (`rename`), which is how a checkpoint is committed.
"""

from __future__ import annotations

import errno
import fcntl
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from argosy.errors import UserError

MOUNTS = Path("/proc/self/mountinfo")
OBJECT_STORES = ("s3fs", "goofys", "gcsfuse", "rclone", "blobfuse", "blobfuse2", "mountpoint-s3", "mount-s3", "ossfs")
"""Mounted object stores: they rename a folder by copying its files one by one."""
LOCAL_LOCKS = ("nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock")
"""Options of NFS and Lustre mounts whose locks other machines do not see."""
REMEDY = (
    "Choose another disk with --run-dir: a local one, or for several machines NFS 4, Lustre mounted with flock, CephFS "
    "or alike. Copies of checkpoints may go to an object store: checkpoint.remote."
)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def check_storage(run_dir: Path, nodes: int = 1) -> None:
    """Try what a run of `nodes` machines needs of the storage of `run_dir`, which exists. It takes some milliseconds.

    Raises: UserError that names what is missing.
    """
    kind, options = mount_of(run_dir)
    if kind.removeprefix("fuse.") in OBJECT_STORES:
        raise UserError(
            f"{run_dir} is on a mounted object store ({kind}), where a folder is not renamed at once. {REMEDY}"
        )
    if nodes > 1 and (local := [option for option in options if option in LOCAL_LOCKS]):
        raise UserError(
            f"{run_dir} is mounted with {local[0]} ({kind}): machines do not see each other's locks there. Mount it "
            f"without, on all machines. {REMEDY}"
        )
    try:
        probe = Path(tempfile.mkdtemp(prefix=".storage-", dir=run_dir))
    except OSError as problem:
        raise UserError(f"{run_dir}: cannot be written ({problem.strerror}). {REMEDY}") from None
    try:
        _check_locks(run_dir, probe)
        _check_renames(run_dir, probe)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def mount_of(path: Path, mounts: Path = MOUNTS) -> tuple[str, Sequence[str]]:
    """Return the kind of the file system that `path` is on, and its options; both empty if the system does not say.

    The format is that of proc_pid_mountinfo(5).
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "", ()
    found: tuple[int, str, Sequence[str]] = (-1, "", ())
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))  # \040: a blank
        if path.absolute().is_relative_to(point) and len(point.parts) >= found[0]:
            kind, _, options = (*after.split(), "", "")[:3]
            found = len(point.parts), kind, [*before.split()[5].split(","), *options.split(",")]
    return found[1:]


def _check_locks(run_dir: Path, probe: Path) -> None:
    path = probe / "lock"
    with path.open("w") as one, path.open("w") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in NO_LOCKS:
                raise
            raise UserError(f"{run_dir}: its storage has no locks (flock: {problem.strerror}). {REMEDY}") from None
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise UserError(f"{run_dir}: its storage lets two processes have one lock (flock). {REMEDY}")


def _check_renames(run_dir: Path, probe: Path) -> None:
    partial, whole, other = probe / "partial", probe / "whole", probe / "other"
    for folder in (partial, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    try:
        partial.rename(whole)
    except OSError as problem:
        raise UserError(f"{run_dir}: its storage cannot rename a folder ({problem.strerror}). {REMEDY}") from None
    if partial.exists() or not (whole / "file").is_file():
        raise UserError(f"{run_dir}: its storage does not rename a folder as a whole. {REMEDY}")
    try:
        other.rename(whole)
    except OSError:
        return
    raise UserError(f"{run_dir}: its storage renames a folder over another that is not empty. {REMEDY}")
