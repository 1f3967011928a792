"""A bounded folder of blocks on this machine's disk, which processes and runs share.

    argosy-cache.json          says that the folder is a cache, and of which format
    lock, used                 who counts and evicts; the bytes that are counted
    folders/ID/                manifest, tokenizer and ETag of each folder in a store
    shards/SHA256/crc32        checksums of a shard's blocks
    shards/SHA256/0000012      block 12 of the shard whose .bin has this SHA-256
    readers/ID.plan            when a process will need which block; its lock lives as long as the process

Blocks are named by what they are part of, so runs that read the same data share them, wherever these lie. A block is
written beside its name under a lock of its own and renamed: it is whole or not there. It is not synced: whoever uses it
first in a process compares it with its checksum, and one that a power cut damaged is fetched again.

When room is needed, the block that all readers need last goes first (Belady 1966); what a reader needs in its next
steps is pinned, and no other takes it away.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from argosy.config.data import CacheConfig
from argosy.data.manifest import CHECKSUM_BLOCK_BYTES
from argosy.data.order import U64
from argosy.errors import UserError
from argosy.files import PARTIAL, atomic_write, json_of

CACHE_FORMAT = {"argosy_cache": 1}
CACHE_MARK = "argosy-cache.json"
CACHE_NAMES = {CACHE_MARK, CACHE_MARK + PARTIAL, "lock", "used", "folders", "shards", "readers", "lost+found"}
"""Names that may lie in the folder; the last is a disk's."""
DISK_SHARE = 0.9
"""Share of the disk's free room that the cache takes at most."""
BATCH_SHARE = 0.01
"""Share of the cache that is evicted at once: a list of all blocks is made for it."""
NEVER_NEEDED = 2**32 - 1
"""Steps until a block is needed that no reader has in its plan."""

U32 = npt.NDArray[np.uint32]
PLAN_ROW = np.dtype([("key", "<u8"), ("due", "<u4")])


def block_key(shard_sha256: str, block: int) -> int:
    """Return 64 bits that name a block in plans: 40 of its shard, 24 of its number there."""
    return int(shard_sha256[:10], 16) << 24 | block


class Cache:
    """The folder of `config`, made if it is missing.

    Raises: UserError if it cannot be written, or holds something else.
    """

    def __init__(self, config: CacheConfig):
        self.folder, self.timeout_s = config.path, config.timeout_s
        self._mutex = threading.Lock()
        try:
            self._check_folder()
            self._lock_file: IO[Any] = (self.folder / "lock").open("a+b")
            with self.locked():
                self._make()
                if not self._live():
                    for left in (self.folder / "readers").iterdir():
                        left.unlink(missing_ok=True)
                    self._set_used(sum(len(names) for _, names in self._listed()) * CHECKSUM_BLOCK_BYTES)
                disk = os.statvfs(self.folder)
                free = int(disk.f_bavail * disk.f_frsize * DISK_SHARE)
                self.capacity = (
                    min(config.size_bytes, self._used() + free) // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES
                )
        except OSError as problem:
            raise UserError(
                f"data.cache.folder = {self.folder}: cannot be written ({problem.strerror or problem}). "
                "Choose a folder on a disk of this machine that has room."
            ) from None
        self.asked = config.size_bytes
        self.problem = ""
        """Why nothing more is stored, if the disk refuses it."""

    @property
    def blocks(self) -> int:
        return self.capacity // CHECKSUM_BLOCK_BYTES

    def path(self, shard: str, block: int) -> Path:
        """Return where a block of the shard with this SHA-256 lies, or would."""
        return self.folder / "shards" / shard[:32] / f"{block:07d}"

    def shard_folder(self, shard: str) -> Path:
        """Return the folder of a shard, made if it is missing."""
        folder = self.folder / "shards" / shard[:32]
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def present(self, shard: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the shard's blocks that are here."""
        with suppress(FileNotFoundError):
            return np.array(list(map(int, _blocks_in(self.path(shard, 0).parent))), np.int64)
        return np.empty(0, np.int64)

    @contextmanager
    def claimed(self, shard: str, block: int) -> Iterator[IO[bytes] | None]:
        """Open the file that the block is to be written to; None if it is here, or another is fetching it.

        Nothing remains of it unless `keep` was called. Raises: OSError (a full disk).
        """
        path = self.path(shard, block)
        partial = path.with_name(path.name + PARTIAL)
        self.shard_folder(shard)
        with partial.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_mine = not path.exists() and os.fstat(file.fileno()).st_ino == partial.stat().st_ino
            except (BlockingIOError, FileNotFoundError):
                is_mine = False
            if not is_mine:
                if path.exists():
                    _remove_if_same(partial, file)
                yield None
                return
            try:
                file.truncate(0)
                yield file
            finally:
                _remove_if_same(partial, file)

    def keep(self, file: IO[bytes], shard: str, block: int, data: bytes | memoryview) -> None:
        """Write a claimed block and give it its name. Raises: OSError (a full disk)."""
        file.write(data)
        file.flush()
        path = self.path(shard, block)
        path.with_name(path.name + PARTIAL).replace(path)

    def remove(self, shard: str, block: int) -> None:
        """Remove a block that was found damaged."""
        with suppress(FileNotFoundError):
            self.path(shard, block).unlink()
            self.give_back(1)

    def take_room(self, blocks: int, due: int) -> bool:
        """Count `blocks` more, after evicting others that are needed later than in `due` steps and are not pinned.

        False, and nothing counted, if there is no room. Raises: OSError.
        """
        wanted = blocks * CHECKSUM_BLOCK_BYTES
        with self.locked():
            missing = self._used() + wanted - self.capacity
            if missing > 0:
                self._set_used(
                    max(self._used() - self._evict(-(-missing // CHECKSUM_BLOCK_BYTES), due) * CHECKSUM_BLOCK_BYTES, 0)
                )
            if self._used() + wanted > self.capacity:
                return False
            self._set_used(self._used() + wanted)
            return True

    def give_back(self, blocks: int) -> None:
        """Count `blocks` fewer: they were not stored."""
        with self.locked():
            self._set_used(max(self._used() - blocks * CHECKSUM_BLOCK_BYTES, 0))

    def disk_is_full(self, problem: OSError) -> None:
        """Use no more room than is used now: the disk refused it."""
        with self.locked():
            self.capacity = (
                max(min(self.capacity, self._used() - CHECKSUM_BLOCK_BYTES), 0)
                // CHECKSUM_BLOCK_BYTES
                * CHECKSUM_BLOCK_BYTES
            )
        self.problem = f"{problem.strerror or problem}"

    def _check_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / CACHE_MARK).exists() and {path.name for path in self.folder.iterdir()} - CACHE_NAMES:
            raise UserError(f"data.cache.folder = {self.folder}: holds something else. Choose an empty or new folder.")

    def _make(self) -> None:
        """Mark the folder as a cache, or read its mark. Other processes, which may do the same, wait meanwhile."""
        mark = self.folder / CACHE_MARK
        if not mark.exists():
            with atomic_write(mark) as file:
                file.write(json.dumps(CACHE_FORMAT).encode())
        try:
            is_ours = json_of(mark.read_bytes()) == CACHE_FORMAT
        except ValueError:
            is_ours = False
        if not is_ours:
            raise UserError(
                f"data.cache.folder = {self.folder}: its {CACHE_MARK} is damaged, or of another version. "
                "Delete the folder, or choose another."
            )
        for name in ("folders", "shards", "readers"):
            (self.folder / name).mkdir(exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have the cache alone, among all threads and processes."""
        with self._mutex:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _used(self) -> int:
        with suppress(FileNotFoundError, ValueError):
            return int((self.folder / "used").read_text())
        return 0

    def _set_used(self, used: int) -> None:
        (self.folder / "used").write_text(str(used))  # a crash amid this is mended by the next first reader's count

    def _listed(self) -> Iterator[tuple[str, list[str]]]:
        for folder in os.scandir(self.folder / "shards"):
            yield folder.name, _blocks_in(Path(folder))

    def _live(self) -> list[Path]:
        """Return the plans of readers that live; those of dead ones are removed."""
        plans = []
        for path in (self.folder / "readers").glob("*.plan"):
            with suppress(OSError), path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    plans.append(path.with_suffix(".rows"))
                else:
                    path.unlink()
                    path.with_suffix(".rows").unlink(missing_ok=True)
        return plans

    @property
    def readers(self) -> int:
        """Processes that have a plan now."""
        with self.locked():
            return len(self._live())

    def _evict(self, blocks: int, due: int) -> int:
        """Remove at least `blocks`, if so many are needed later than in `due` steps; return how many."""
        paths: list[str] = []
        keys: list[int] = []
        for shard, names in self._listed():
            paths += [f"{shard}/{name}" for name in names]
            keys += [block_key(shard, int(name)) for name in names]
        dues = np.full(len(keys), NEVER_NEEDED, np.uint32)
        keep_until = np.zeros(len(keys), bool)
        for plan in map(FetchPlan.read, self._live()):
            found = plan.due(np.array(keys, np.uint64))
            keep_until |= found <= plan.pinned
            dues = np.minimum(dues, found)
        dues[keep_until] = 0
        order = np.argsort(dues, kind="stable")[::-1]
        order = order[dues[order] > due][: max(blocks, int(self.blocks * BATCH_SHARE))]
        removed = 0
        for index in order.tolist():
            with suppress(FileNotFoundError):
                (self.folder / "shards" / paths[index]).unlink()
                removed += 1
        return removed


class FetchPlan:
    """The blocks that a reader will need: their keys, ascending, and in how many steps each is needed first."""

    def __init__(self, keys: U64, dues: U32, pinned: int):
        self._keys, self._dues, self.pinned = keys, dues, pinned

    def due(self, keys: U64) -> U32:
        """Return in how many steps each of `keys` is needed; NEVER_NEEDED if it is not in the plan."""
        if not len(self._keys):
            return np.full(len(keys), NEVER_NEEDED, np.uint32)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[places] == keys, self._dues[places], np.uint32(NEVER_NEEDED))

    @classmethod
    def read(cls, path: Path) -> FetchPlan:
        """Read what `Reader.write` wrote; an empty plan if it is not there yet."""
        try:
            rows = np.fromfile(path, PLAN_ROW)
        except FileNotFoundError:
            rows = np.empty(0, PLAN_ROW)
        pinned = int(rows["due"][0]) if len(rows) else 0
        return cls(rows["key"][1:].copy(), rows["due"][1:].copy(), pinned)


class Reader:
    """This process's plan in the cache. It is gone with the process, however that ends."""

    def __init__(self, cache: Cache):
        self._path = cache.folder / "readers" / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.plan"
        with cache.locked():  # a process that opens the cache clears away plans without a lock: those of dead readers
            self._file = self._path.open("wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, keys: U64, dues: U32, pinned: int) -> None:
        """Tell the others what is needed when; what is needed within `pinned` steps is not taken away.

        Raises: OSError.
        """
        rows = np.empty(len(keys) + 1, PLAN_ROW)
        order = np.argsort(keys)
        rows["key"][0], rows["due"][0] = 0, pinned
        rows["key"][1:], rows["due"][1:] = keys[order], dues[order]
        path = self._path.with_suffix(".rows")
        partial = path.with_suffix(".rows" + PARTIAL)
        rows.tofile(partial)
        partial.replace(path)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._path.with_suffix(".rows").unlink(missing_ok=True)
        self._file.close()


def _blocks_in(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.isdigit()]  # noqa: PTH208  (names are enough, and faster)


def _remove_if_same(path: Path, file: IO[bytes]) -> None:
    with suppress(FileNotFoundError):
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            path.unlink()
