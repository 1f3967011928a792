"""The files of a checkpoint: the names that they can have, and the checksums that tell whether they are as written.

Names come from outside too, from a manifest in a folder or a bucket, and from a bucket's listing: no other is read,
written or deleted. A signed record carries its own checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.errors import ArgosyError
from argosy.files import json_of, open_regular

_STEP_FOLDER = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,14})")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step whose `step_name` this is; None if it is that of none."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def foreign(names: Collection[str]) -> str | None:
    """Return the first of `names` that is not in a checkpoint of so many files; None if all are.

    The files of a checkpoint are those of ranks 0, 1, ... without a gap.
    """
    known = {shard_name(rank) for rank in range(len(names))}
    return next((name for name in names if name not in known), None)


HASHING_THREADS = 8
"""Threads that read files back: hashing releases Python's lock."""
HASH_BYTES = 4 * 2**20
RECORD_BYTES = 64 * 2**20
"""No signed record is larger: the manifest of 16,384 ranks has 3 MB."""


class DamagedCheckpoint(ArgosyError):
    """A committed checkpoint is not what was written."""


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of one file."""

    bytes: int
    sha256: str


def check_files(folder: Path, files: Mapping[str, FileSum]) -> None:
    """Read files of `folder` back.

    Raises: DamagedCheckpoint, naming the first that is missing or differs from `files`.
    """

    def problem(name: str) -> str | None:
        wanted = files[name]
        try:
            found = file_sum(folder / name, wanted.bytes)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error})"
        if found.bytes != wanted.bytes:
            return f"has {found.bytes} bytes, its manifest says {wanted.bytes}"
        if found.sha256 != wanted.sha256:
            return f"does not match its checksum (manifest {wanted.sha256[:8]}..., file {found.sha256[:8]}...)"
        return None

    with ThreadPoolExecutor(min(HASHING_THREADS, max(1, len(files)))) as pool:
        for name, found in zip(files, pool.map(problem, files), strict=True):
            if found:
                raise DamagedCheckpoint(f"{folder}: file {name} {found}")


def file_sum(path: Path, only_of_bytes: int | None = None) -> FileSum:
    """Return size and SHA-256 of a file, read from the disk where the kernel drops what it has cached.

    only_of_bytes: a file of another size is not read, and has no checksum. Raises: OSError, also if it is not a regular
    file.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if only_of_bytes not in (None, size):
            return FileSum(bytes=size, sha256="")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        chunk = bytearray(HASH_BYTES)
        while count := file.readinto(chunk):
            digest.update(memoryview(chunk)[:count])
    return FileSum(bytes=size, sha256=digest.hexdigest())


def signed(record: Mapping[str, Any]) -> bytes:
    """Return `record` as JSON, with the SHA-256 of the rest as its last entry."""
    digest = hashlib.sha256(json.dumps(record, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**record, "sha256": digest}, indent=1).encode()


def checked(data: bytes, path: Path | str) -> dict[str, Any]:
    """Return the record that `signed` made `data` of, byte for byte. Raises: DamagedCheckpoint, naming `path`."""
    if len(data) > RECORD_BYTES:
        raise DamagedCheckpoint(f"{path}: has more than {RECORD_BYTES >> 20} MiB, which no record has")
    try:
        record = json_of(data)
    except ValueError as error:
        raise DamagedCheckpoint(f"{path}: cannot be read ({error})") from None
    rest = {key: value for key, value in record.items() if key != "sha256"} if isinstance(record, dict) else {}
    if not rest or signed(rest) != data:
        raise DamagedCheckpoint(f"{path}: does not match its own checksum")
    return rest
