"""The name of a model, as headlines show it."""

from __future__ import annotations

from argosy.config.catalog import preset_path
from argosy.config.layers import preset_layer
from argosy.config.load import build
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig

NOT_SIZES = {
    *("preset", "weights", "vocab_size", "init_std", "norm_eps", "mup"),
    *("max_seq_len", "rope_theta", "rope_scaling"),
}
"""Keys that make no other model of a preset."""


def model_name(model: ModelConfig, otherwise: str = "") -> str:
    """Return the preset's name, with a remark if its sizes were changed; without one, `otherwise` or the family."""
    if model.preset is None:
        return otherwise or model.family
    preset = build(RunConfig, preset_layer(preset_path("models", model.preset))).model
    as_it_is = preset.model_dump(exclude=NOT_SIZES) == model.model_dump(exclude=NOT_SIZES)
    return model.preset if as_it_is else f"{model.preset} with other sizes"
