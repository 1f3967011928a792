"""A checkpoint's manifest: what a checkpoint holds, and the checksum of each of its files.

It comes from outside when it is read: each value is checked, and MalformedRecord names the key and the value. By hand,
not with pydantic: each rank has a process that writes its checkpoints, and it is to start in a moment.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.checkpoint.checksums import FileSum, checked, foreign, signed
from argosy.checkpoint.fence import OLD_NAME
from argosy.checkpoint.history import History
from argosy.errors import UserError, a_kind

MOST_INTEGER = 2**63 - 1
"""The largest whole number that is taken."""
SHOWN_LETTERS = 60
"""Letters of a wrong value that are shown."""
_SHA256 = re.compile("[0-9a-f]{64}")

Reader = Callable[[str, Any], Any]


class MalformedRecord(ValueError):
    """A record does not have the values that it must have."""


def whole(key: str, value: Any) -> int:
    """Return a whole number from 0 to MOST_INTEGER."""
    if type(value) is not int or not 0 <= value <= MOST_INTEGER:
        raise _wrong(key, value, "a whole number from 0 to 2^63 - 1")
    return value


def number(key: str, value: Any, most: float) -> float:
    """Return a number from 0 to `most`."""
    if type(value) not in (int, float) or not 0 <= value <= most or not math.isfinite(value):
        raise _wrong(key, value, f"a number from 0 to {most}")
    return float(value)


def text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(key, value, "a string")
    return value


def sha256(key: str, value: Any) -> str:
    """Return 64 hexadecimal digits."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise _wrong(key, value, "a SHA-256, 64 hexadecimal digits")
    return value


def flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(key, value, "a mapping")
    return value


def entries(key: str, value: Any, *names: str) -> list[Any]:
    """Return the values of a mapping that has exactly these names."""
    found = mapping(key, value)
    if set(found) != set(names):
        raise _wrong(key, value, f"a mapping of {', '.join(names)}")
    return [found[name] for name in names]


def pairs(key: str, value: Any, first: Reader, second: Reader) -> tuple[tuple[Any, Any], ...]:
    """Return a list of pairs."""
    if not isinstance(value, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        raise _wrong(key, value, "a list of pairs")
    return tuple((first(key, a), second(key, b)) for a, b in value)


def shown(value: Any) -> str:
    """Return a value as messages show it: not more than the beginning of a long one."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not spell out numbers of more than 4,300 digits
        text = a_kind(value)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


def _wrong(key: str, value: Any, wanted: str) -> MalformedRecord:
    return MalformedRecord(f"{shown(key)[1:-1]} = {shown(value)}, and must be {wanted}")


CHECKPOINT_FORMAT = 2
END_OF_CALENDAR_S = 253_402_300_799
"""The end of the year 9999 in seconds since 1970: no calendar goes further."""


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Contents of a checkpoint. If a folder of that name has a manifest, all of the checkpoint is there."""

    format: int = CHECKPOINT_FORMAT
    step: int
    """Optimizer steps done; also the data cursor: the next sample is the first of that step (`config.train`)."""
    tokens: int
    """Tokens trained on."""
    saved_at_s: float
    """Seconds since 1970."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of samples that are part of the cursor: no update is made from them."""
    rounds: int = 0
    """Outer steps made; 0 unless the run has sites."""
    history: History = field(default_factory=History)
    plan: str
    """The layout it was saved under."""
    data_identity: str
    """Identity of the prepared data (`Manifest.identity`); empty for imported weights."""
    config_sha256: str = ""
    """SHA-256 of the run file, without keys that may change when a run goes on (`config.identity`)."""
    base_sha256: str = ""
    """SHA-256 of the weights that an adapter's checkpoint leaves out: that of their checkpoint's manifest, or what
    tells their Hugging Face folder from others (`models.hf.weights_sha256`)."""
    has_optimizer: bool
    """False for imported weights: good for generate, evaluate and model.weights, not to resume from."""
    generation: int = 0
    """Generation whose processes wrote it."""
    files: dict[str, FileSum]

    def to_record(self) -> dict[str, Any]:
        record = asdict(self)
        if not self.base_sha256:  # manifests of whole models are as they were before there were adapters
            del record["base_sha256"]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CheckpointManifest:
        """Return the manifest whose `to_record` this is. Raises: MalformedRecord if it is that of none."""
        if OLD_NAME in record:
            record = {"generation": record[OLD_NAME], **{k: v for k, v in record.items() if k != OLD_NAME}}
        given = {key: READ[key](key, value) for key, value in record.items() if key in READ}
        if unknown := set(record) - set(READ):
            raise MalformedRecord(f"{shown(min(unknown))} is no key of a manifest")
        if missing := REQUIRED - set(record):
            raise MalformedRecord(f"{sorted(missing)[0]} is missing")
        return cls(**given)

    def to_bytes(self) -> bytes:
        """Return the content of its file: the record, signed."""
        return signed(self.to_record())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of `to_bytes`; it identifies the checkpoint."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path | str) -> CheckpointManifest:
        """Return the manifest whose `to_bytes` this is.

        Raises: DamagedCheckpoint; UserError if it has another format, or is signed and no manifest all the same: no
        disk does that. Both name `path`.
        """
        record = checked(data, path)
        if record.get("format") != CHECKPOINT_FORMAT:
            raise UserError(
                f"{path}: format = {shown(record.get('format'))}, and this version reads checkpoints of format "
                f"{CHECKPOINT_FORMAT}. Go on with the version that wrote it, or start anew with another --run-dir."
            )
        try:
            manifest = cls.from_record(record)
        except MalformedRecord as problem:
            raise UserError(
                f"{path}: {problem}. No version wrote that. Move its folder away to go on from an earlier checkpoint."
            ) from None
        # Of the bytes that are there: `to_bytes` would give a key that was renamed its new name.
        vars(manifest)["sha256"] = hashlib.sha256(data).hexdigest()
        return manifest


def _files(key: str, value: Any) -> dict[str, FileSum]:
    files = {name: _file_sum(f"{key}.{name}", file) for name, file in mapping(key, value).items()}
    if (name := foreign(files)) is not None:
        raise MalformedRecord(f"{key} names {shown(name)}, which a checkpoint of {len(files)} files does not have")
    return files


def _file_sum(key: str, value: Any) -> FileSum:
    size, digest = entries(key, value, "bytes", "sha256")
    return FileSum(whole(f"{key}.bytes", size), sha256(f"{key}.sha256", digest))


def _history(key: str, value: Any) -> History:
    depth, ended, world = entries(key, value, "depth", "ended", "world")
    return History(
        whole(f"{key}.depth", depth),
        pairs(f"{key}.ended", ended, text, whole),
        text(f"{key}.world", world),
    )


READ: dict[str, Reader] = {
    "format": whole,
    "step": whole,
    "tokens": whole,
    "saved_at_s": lambda key, value: number(key, value, END_OF_CALENDAR_S),
    "skipped": lambda key, value: pairs(key, value, whole, whole),
    "rounds": whole,
    "history": _history,
    "plan": text,
    "data_identity": text,
    "config_sha256": text,
    "base_sha256": sha256,
    "has_optimizer": flag,
    "generation": whole,
    "files": _files,
}
"""Key of a record -> what checks and reads its value."""
REQUIRED = set(READ) - {"format", "base_sha256", "config_sha256", "generation", "rounds"}
assert set(READ) == {f.name for f in fields(CheckpointManifest)}
