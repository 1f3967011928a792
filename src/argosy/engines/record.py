"""The record of a launched job in its run's folder, and what of it may be acted upon.

A run's folder may be somebody else's, or a copy of it, and what its record says becomes words of ssh, kubectl and
scancel. So nothing is done with a record that another user may have written; of this user's, each engine checks every
word; and engines that are told where to go (a host, options of ssh, an address) act only upon a record with a seal: the
HMAC of its text with a key that is kept in the user's home. One that was changed, or is of another user, has none that
holds; and of a folder that this user has copied, the job is that of the folder that was copied.
"""

from __future__ import annotations

import hmac
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from argosy.errors import UserError, first_error
from argosy.files import atomic_write, read_with_owner, state_folder
from argosy.processes.secret import kept_secret

LAUNCH_FOLDER = "launch"
"""The folder in a run's folder for what was launched, and what that printed."""
JOB_RECORD = "job.json"
WRITTEN_TO = "record"
"""The word of a record's `place` that is the run's folder which it was written to."""
SEAL_KEY_FILE = "key"
"""The file in the user's folder for state that records are sealed with."""
STOP_FILE = "stop"
"""A file in that folder: nothing that has ended is started again."""
MOST_RECORD_BYTES = 1 << 20
"""A longer record was not written by `argosy launch`."""
MODE = 0o644
JobState = Literal["waiting", "running", "ended", "unknown"]
"""unknown: the engine cannot be asked now, or must not be; nothing may be submitted in the job's place."""


class LaunchedJob(BaseModel):
    """The record of a launched job, in the run's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engine: str
    id: str
    """The engine's name for it."""
    submitted_s: float
    """Seconds since 1970."""
    nodes: int
    log: str = ""
    """The file that it prints to, or the folder of several, if there is one."""
    options: tuple[str, ...] = ()
    """The words that gave `argosy launch` the engine's options."""
    secret: str = ""
    """The fingerprint of the secret that the environment or the run's folder gave it; empty: it made its own."""
    place: dict[str, str] = {}
    """The words by which the engine finds it again: an address, a namespace, hosts, ..."""
    seal: str = ""
    """Proves that this user has written the rest."""
    foreign: str = Field("", exclude=True)
    """The other user who may have written the record; empty: none. Not in the file."""
    is_sealed: bool = Field(True, exclude=True)
    """False if it was read from a file without a seal of this user's. Not in the file."""
    original: str = Field("", exclude=True)
    """The run's folder that has the job, if the record was read from a copy of that; else empty. Not in the file."""

    @property
    def run_dir(self) -> Path:
        """The run's folder; only of a job that prints to a file there."""
        return Path(self.log).parent.parent

    @classmethod
    def submitted(
        cls, engine: str, job_id: str, nodes: int, log: Path | str = "", place: Mapping[str, str] | None = None
    ) -> LaunchedJob:
        """Return the record of a job that was submitted just now."""
        now_s = round(time.time(), 3)
        return cls(engine=engine, id=job_id, submitted_s=now_s, nodes=nodes, log=str(log), place=dict(place or {}))

    @property
    def is_mine(self) -> bool:
        """True if this user has launched the run in this folder, and nobody else has written the record."""
        return self.is_sealed and not self.foreign and not self.original

    def save(self, run_dir: Path) -> None:
        """Write it to the run's folder, sealed if this user has a home to keep the key in."""
        job, seal = self.model_copy(update={"place": {**self.place, WRITTEN_TO: str(run_dir.absolute())}}), ""
        with suppress(UserError):
            seal = job._seal_with(user_key())
        with atomic_write(run_dir / LAUNCH_FOLDER / JOB_RECORD) as file:
            os.fchmod(file.fileno(), MODE)  # whatever the umask lets a group do: else it would be theirs too
            file.write(job.model_copy(update={"seal": seal}).model_dump_json(indent=1).encode() + b"\n")

    @classmethod
    def load(cls, run_dir: Path) -> LaunchedJob | None:
        """Return the last one that was launched in a run's folder; None if none was.

        What it prints to is looked for in this folder only. Raises: UserError.
        """
        path = run_dir / LAUNCH_FOLDER / JOB_RECORD
        try:
            text, foreign = read_with_owner(path, MOST_RECORD_BYTES)
            job = cls.model_validate_json(text)
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as problem:
            why = first_error(problem) if isinstance(problem, ValidationError) else problem
            raise UserError(f"{path}: is no record of a launched run ({why}). Remove it, and launch again.") from None
        folder, name = path.parent.absolute(), Path(job.log).name
        log = str(folder if name == LAUNCH_FOLDER else folder / name) if name else ""
        found = {"log": log, "foreign": foreign, "is_sealed": job._has_seal(), "original": job._original(path)}
        return job.model_copy(update=found)

    def _original(self, path: Path) -> str:
        """Return the run's folder that this record was written to, if that still has one and `path` is another file."""
        written = self.place.get(WRITTEN_TO, "")
        with suppress(OSError, ValueError):  # there is none now, or no path
            if written and not (Path(written) / LAUNCH_FOLDER / JOB_RECORD).samefile(path):
                return written
        return ""

    def _has_seal(self) -> bool:
        if not self.seal:
            return False
        try:
            is_there = (state_folder() / SEAL_KEY_FILE).exists()  # else it cannot be this user's
            return is_there and hmac.compare_digest(self.seal.encode(), self._seal_with(user_key()).encode())
        except (OSError, RuntimeError, UserError):
            return False

    def _seal_with(self, key: bytes) -> str:
        return hmac.digest(key, self.model_dump_json(exclude={"seal"}).encode(), "sha256").hex()

    def check(self, **words: tuple[str | None, re.Pattern[str]]) -> None:
        """Check words of the record, given as (value, what it has to match). Raises: UserError."""
        for name, (value, pattern) in words.items():
            if value is None or not pattern.fullmatch(value):
                raise UserError(
                    f"the record of the launched run ({LAUNCH_FOLDER}/{JOB_RECORD}) says {name} = {value!r}, which "
                    f"{self.engine} never writes: somebody changed the record, so it is not used. Remove it if the run "
                    "has ended."
                )


def user_key() -> bytes:
    """Return the key that this user's records are sealed with; the first call makes it. Raises: UserError."""
    try:
        path = state_folder() / SEAL_KEY_FILE
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return kept_secret(path)
    except (OSError, RuntimeError) as problem:
        raise UserError(
            f"the key that seals records of launched runs cannot be stored ({problem}). Set XDG_STATE_HOME to a folder "
            "of yours that lasts."
        ) from None
