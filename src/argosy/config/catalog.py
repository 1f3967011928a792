"""The presets that come with Argosy: model sizes, whole runs, devices and clusters, one TOML file each."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from argosy.errors import UserError

FOLDER = Path(__file__).parent / "presets"

Kind = Literal["models", "runs", "devices", "clusters"]


def preset_names(kind: Kind) -> list[str]:
    """Names of the presets there are."""
    return sorted(path.stem for path in (FOLDER / kind).glob("*.toml"))


def preset_path(kind: Kind, name: str) -> Path:
    """The file of a preset. Raises: UserError if there is none of that name."""
    names = preset_names(kind)
    if name not in names:
        raise UserError(f"no {kind[:-1]} preset is called {name!r}; {near_names(name, names)}")
    return FOLDER / kind / f"{name}.toml"


def near_names(name: str, names: list[str]) -> str:
    """The second half of a message about an unknown name: the nearest names, or all if none is near."""
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(names)}."
