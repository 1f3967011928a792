"""The sizes of a model that starts from weights: those of the run that they are of."""

from __future__ import annotations

from pathlib import Path

from argosy.config.keys import Key
from argosy.config.layers import Layer, file_layer
from argosy.errors import UserError

WEIGHTS: Key = ("model", "weights")
PRESET: Key = ("model", "preset")
OF_ANY_MODEL: tuple[Key, ...] = (WEIGHTS, ("model", "init_std"))
"""Keys of the model that no preset sets."""


def of_weights(asked: Layer) -> Layer:
    """Return the model's sizes in the run of `model.weights`, if `asked` names weights and no preset.

    Raises: UserError if there is no such run, and `asked` says nothing of the sizes either.
    """
    entry = asked.get(WEIGHTS)
    if entry is None or not isinstance(entry.value, str | Path) or PRESET in asked:
        return {}
    folder = Path(entry.value)
    runs = [path for path in (folder / "run.toml", folder.parent.parent / "run.toml") if path.is_file()]
    if runs:
        file = file_layer(runs[0], str(runs[0]), runs[0].parent)
        return {key: found for key, found in file.items() if key[0] == "model" and key not in (PRESET, *OF_ANY_MODEL)}
    if any(key[0] == "model" and key not in OF_ANY_MODEL for key in asked):
        return {}
    raise UserError(
        f"{entry.source.place(WEIGHTS).text}model.weights = {folder}: no run.toml there says the model's sizes. "
        "Give a run folder or one of its checkpoints, e.g. what `argosy checkpoint import` wrote."
    )
