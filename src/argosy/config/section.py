"""The base of the run file's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from argosy.config.meaning import explain
from argosy.credentials import REMEDY, has_credentials


class Section(BaseModel):
    """A table of the run file: immutable, and closed (an unknown key is an error)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=explain,
        validate_default=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    @field_validator("*")
    @classmethod
    def _refuse_credentials(cls, value: Any) -> Any:
        """A run file is written to the run's folder, and what it says to logs and manifests."""
        texts = value if isinstance(value, tuple | dict) else [value]
        if any(isinstance(text, str | Path) and has_credentials(str(text)) for text in texts):
            raise ValueError(REMEDY)
        return value
