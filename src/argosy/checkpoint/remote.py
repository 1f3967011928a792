"""Copies of checkpoints in another place: an object store, or any other file system that fsspec knows."""

from __future__ import annotations

import glob
import hashlib
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from argosy.checkpoint import fence, store
from argosy.checkpoint.checksums import (
    HASH_BYTES,
    RECORD_BYTES,
    DamagedCheckpoint,
    FileSum,
    check_files,
    step_name,
    step_of,
)
from argosy.checkpoint.fence import NAME_FILE, claim, make_remote_folder
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.store import MANIFEST, Checkpoint
from argosy.credentials import CREDENTIALS_REMEDY, has_credentials
from argosy.errors import ArgosyError, UserError
from argosy.files import fsspec_place, make_folder, sync_folder
from argosy.sync.layout import home_of

if TYPE_CHECKING:
    from argosy.plan.plan import Plan

Answer = TypeVar("Answer")
FIRST_ANSWER_S = 60.0
"""Longest wait for the place's first answer; a run that has a checkpoint here goes on without."""


class Remote:
    """The copies of one run's checkpoints: URL/NAME/step-00000100/ for the run folder .../NAME; those of a site are in
    URL/NAME/sites/SITE/, as its folder is.

    The manifest of each is written last, once all its files were read back from there. Besides what their docstrings
    say, methods raise whatever the file system raises, mostly OSError; and UserError if the copies there are those of
    another run (`fence.claim`).
    """

    def __init__(self, url: str, run_dir: Path):
        """Raises: UserError if fsspec has no such file system, or lacks the package for it."""
        if has_credentials(url):
            raise UserError(f"checkpoint.remote = {url}: {CREDENTIALS_REMEDY}.")
        self._run_dir = run_dir
        self._fs: Any
        name = run_dir.relative_to(home_of(run_dir).parent).as_posix()
        try:
            self._fs, place = fsspec_place(url)
        except (ImportError, ValueError) as problem:
            raise UserError(
                f"checkpoint.remote = {url}: {problem}. Give a URL that fsspec knows, such as s3://bucket/folder, and "
                "install its package, or leave the key out."
            ) from None
        self._root = f"{place.rstrip('/')}/{name}"
        self._whole: set[int] = set()
        """Steps whose copies are known to be whole."""

    def _in_time(self, ask: Callable[[], Answer]) -> Answer:
        """Return the place's first answer. Raises: as `ask`; OSError without one, for which s3fs waits 15 minutes."""
        answer = Future[Answer]()

        def work() -> None:
            try:
                answer.set_result(ask())
            except BaseException as problem:
                answer.set_exception(problem)

        threading.Thread(target=work, name="argosy-remote", daemon=True).start()
        try:
            return answer.result(FIRST_ANSWER_S)
        except TimeoutError:
            if answer.done():
                raise
            raise OSError(f"no answer for {FIRST_ANSWER_S:.0f} s") from None

    def _claim(self) -> None:
        self._in_time(lambda: claim(self._fs, self._root, self._run_dir))

    def newest_plan(self) -> str:
        """Return the plan of the newest copy; "" if there is none or the place is not this run's. Claim nothing."""
        is_mine = self._in_time(lambda: fence.is_owner(self._fs, self._root, self._run_dir))
        newest = self.newest() if is_mine else None
        return "" if newest is None else self._manifest(newest).plan

    def newest(self, before: float = math.inf) -> int | None:
        """Return the newest step before `before` of which there is a copy, asking for none that is older."""
        return next((step for step in reversed(self._begun()) if step < before and self._is_whole(step)), None)

    def steps(self) -> list[int]:
        """Return the steps of which there are copies, in order."""
        return [step for step in self._begun() if self._is_whole(step)]

    def _begun(self) -> list[int]:
        """Return the steps of which there are copies, or parts of them, in order."""
        self._claim()
        self._fs.invalidate_cache()
        names = [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        return sorted(step for step in map(step_of, names) if step is not None)

    def _is_whole(self, step: int) -> bool:
        """Return True if the copy of `step`, which was begun, has its manifest; a place is asked once for each."""
        if step not in self._whole and self._fs.exists(self._path(step, MANIFEST)):
            self._whole.add(step)
        return step in self._whole

    def put(self, checkpoint: Checkpoint, check_generation: Callable[[], None]) -> bool:
        """Copy `checkpoint`, file by file; False if it is there already.

        `check_generation` is called before anything is written, and again before the manifest is.

        Raises: DamagedCheckpoint if the copy differs from what was written.
        """
        self._claim()
        manifest = checkpoint.manifest
        there = self._path(checkpoint.step, MANIFEST)
        if self._fs.exists(there):
            with suppress(ArgosyError):  # damaged, or of another format: it is replaced
                if self._manifest(checkpoint.step) == manifest:
                    return False
            self._forget(checkpoint.step)
        check_generation()
        make_remote_folder(self._fs, self._path(checkpoint.step))
        for name, wanted in manifest.files.items():
            self._fs.put_file(str(checkpoint.folder / name), self._path(checkpoint.step, name))
            if self._sum(self._path(checkpoint.step, name)) != wanted:
                raise DamagedCheckpoint(
                    f"{self._path(checkpoint.step, name)}: does not match its checksum after it was copied"
                )
        check_generation()
        self._fs.pipe_file(there, manifest.to_bytes())
        return True

    def fetch(self, step: int, generation: int) -> Checkpoint:
        """Bring the copy of `step` into the run's folder, as a committed and verified checkpoint.

        A checkpoint of that step that is there already must be damaged, and is withdrawn.

        Raises: DamagedCheckpoint if the copy is, UserError if it is of another format or no checkpoint at all, Fenced.
        """
        try:
            return self._fetch(step, generation)
        except FileNotFoundError as problem:
            raise DamagedCheckpoint(f"{self._path(step)}: a file of it is missing ({problem})") from None

    def _fetch(self, step: int, generation: int) -> Checkpoint:
        manifest = self._manifest(step)
        if manifest.step != step:
            raise DamagedCheckpoint(f"{self._path(step, MANIFEST)}: is that of step {manifest.step}")
        for name, wanted in manifest.files.items():
            if (size := self._fs.size(self._path(step, name))) not in (wanted.bytes, None):
                raise DamagedCheckpoint(f"{self._path(step, name)}: has {size} bytes, its manifest says {wanted.bytes}")
        partial = fence.partial_folder(self._run_dir, step, generation)
        fence.check_generation(self._run_dir, generation)
        store.discard(partial)
        make_folder(partial.parent)
        partial.mkdir()
        try:
            for name, wanted in manifest.files.items():
                there = self._path(step, name)
                self._fs.get_file(there, str(partial / name), callback=_at_most(wanted.bytes, there))
                sync_folder(partial / name)
            check_files(partial, manifest.files)
            if store.step_folder(self._run_dir, step).exists():
                store.withdraw(Checkpoint(store.step_folder(self._run_dir, step)))
            checkpoint = store.commit(partial, manifest, generation)
        except BaseException:
            store.discard(partial)
            raise
        checkpoint.mark_verified()
        return checkpoint

    def prune(self, keep_last: int, keep_every: int) -> None:
        """Delete the copies that `store.prune` would delete here, and what kills left of those before the newest one.

        All copies count as verified.
        """
        begun = self._begun()
        whole = [step for step in begun if self._is_whole(step)]
        for step in whole[: -max(keep_last, store.VERIFIED_KEPT)]:
            if not (keep_every and step % keep_every == 0):
                self._remove(step)
        for step in begun:
            if step not in whole and step < max(whole, default=0):
                self._remove_folder(step)

    def forget_after(self, step: int) -> None:
        """Delete the copies of steps after `step`: the run has turned away from them."""
        for later in self._begun():
            if later > step and self._is_whole(later):
                self._remove(later)

    def _remove(self, step: int) -> None:
        self._forget(step)
        self._remove_folder(step)

    def _forget(self, step: int) -> None:
        self._whole.discard(step)
        self._fs.rm_file(self._path(step, MANIFEST))

    def _remove_folder(self, step: int) -> None:
        folder = self._path(step)
        is_local = "file" in self._fs.protocol  # others take [a] in a path for a pattern
        self._fs.rm(folder if is_local else glob.escape(folder), recursive=True)

    def _manifest(self, step: int) -> CheckpointManifest:
        path = self._path(step, MANIFEST)
        return CheckpointManifest.from_bytes(self._fs.cat_file(path, start=0, end=RECORD_BYTES + 1), path)

    def _path(self, step: int, name: str = "") -> str:
        folder = f"{self._root}/{step_name(step)}"
        return f"{folder}/{name}" if name else folder

    def _sum(self, path: str) -> FileSum:
        digest, size = hashlib.sha256(), 0
        with self._fs.open(path, "rb") as file:
            while chunk := file.read(HASH_BYTES):
                digest.update(chunk)
                size += len(chunk)
        return FileSum(size, digest.hexdigest())


def _at_most(size: int, path: str) -> Any:
    """Return what ends the copying of a file by DamagedCheckpoint once it is longer than `size` bytes, whatever the
    place said of it before."""
    from fsspec.callbacks import Callback

    class SizeLimit(Callback):  # type: ignore[misc]  # fsspec has no types
        def relative_update(self, inc: int = 1) -> None:
            super().relative_update(inc)
            if self.value > size:
                raise DamagedCheckpoint(f"{path}: has more than the {size} bytes that its manifest says")

    return SizeLimit()


def plan_there(url: str, run_dir: Path) -> Plan | None:
    """Return the plan of the newest copy in checkpoint.remote, for a folder that has nothing of its run but the name.

    None if there is none, or it cannot be read: the workers, which need more of it, say why.
    """
    from argosy.plan.plan import Plan  # brings what a writer's process does not need

    with suppress(Exception):  # of any of fsspec's file systems
        if url and (run_dir / NAME_FILE).exists():
            return Plan.parse(told) if (told := Remote(url, run_dir).newest_plan()) else None
    return None
