"""A checkpoint's manifest: what a checkpoint holds, and the checksum of each of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.checkpoint.checksums import FileSum, checked, signed
from argosy.checkpoint.fence import OLD_NAME
from argosy.checkpoint.history import History
from argosy.errors import UserError

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """What a checkpoint holds. If a folder of that name has a manifest, all of the checkpoint is there."""

    format: int = FORMAT
    step: int
    """Optimizer steps done; also the data cursor: the next sample is step * global_batch."""
    tokens: int
    """Tokens trained on."""
    saved_at_s: float
    """Seconds since 1970."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of samples that are part of the cursor: no update is made from them."""
    history: History = field(default_factory=History)
    plan: str
    """The layout it was saved under."""
    data_identity: str
    """Identity of the prepared data (`Manifest.identity`); empty for imported weights."""
    config_sha256: str = ""
    """SHA-256 of the run file, without keys that may change when a run goes on (`config.identity`)."""
    has_optimizer: bool
    """False for imported weights: good for generate, evaluate and model.weights, not to resume from."""
    generation: int = 0
    """Generation whose processes wrote it."""
    files: dict[str, FileSum]

    def to_record(self) -> dict[str, Any]:
        """Return all of it, as JSON has it."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CheckpointManifest:
        """Return the manifest whose `to_record` this is."""
        rest = {key: value for key, value in record.items() if key not in ("files", "skipped", "history")}
        past = record["history"]
        if OLD_NAME in rest:
            rest["generation"] = rest.pop(OLD_NAME)
        return cls(
            files={name: FileSum(**file) for name, file in record["files"].items()},
            skipped=tuple((first, end) for first, end in record["skipped"]),
            history=History(past["depth"], tuple((name, last) for name, last in past["ended"]), past["world"]),
            **rest,
        )

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

        Raises: Damaged, UserError if it has another format; both name `path`.
        """
        record = checked(data, path)
        if record.get("format") != FORMAT:
            raise UserError(
                f"{path}: format = {record.get('format')}, and this version reads checkpoints of format {FORMAT}. Go "
                "on with the version that wrote it, or start anew with another --run-dir."
            )
        manifest = cls.from_record(record)
        # Of the bytes that are there: `to_bytes` would give a key that was renamed its new name.
        vars(manifest)["sha256"] = hashlib.sha256(data).hexdigest()
        return manifest
