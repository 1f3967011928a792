"""The name of a model, as headlines show it."""

import pytest

from argosy.config.load import load, model_name


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"model.preset": "llama-5m"}, "llama-5m"),
        ({"model.preset": "llama-5m", "model.vocab_size": 99, "model.max_seq_len": 64}, "llama-5m"),
        ({"model.preset": "llama-5m", "model.width": 64}, "llama-5m with other sizes"),
        ({"model.preset": "llama-5m", "model.moe.experts": 4}, "llama-5m with other sizes"),
    ],
)
def test_a_preset_gives_its_name_to_a_model_of_its_sizes(keys, name):
    assert model_name(load("demo", {"data.seq_len": 32} | keys).model) == name


def test_a_model_without_a_preset_is_called_otherwise_or_by_its_family():
    model = load("parity").model
    assert model.preset is None
    assert (model_name(model), model_name(model, "mine")) == (model.family, "mine")
