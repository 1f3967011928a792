"""A model that starts from weights has their sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.config.attention import RopeScaling
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.errors import UserError

WEIGHTS = ModelConfig(layers=3, width=96, max_seq_len=4096, vocab_size=500, rope_scaling=RopeScaling(kind="linear"))


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A run folder with a checkpoint, as `argosy checkpoint import` writes it."""
    folder = tmp_path / "imported"
    (folder / "checkpoints" / "step-00000000").mkdir(parents=True)
    save_run(RunConfig(model=WEIGHTS.model_copy(update={"weights": Path("/elsewhere")})), folder / "run.toml")
    return folder


def run_file(folder: Path, model: str) -> Path:
    (folder / "mine.toml").write_text(f"[model]\n{model}\n")
    return folder / "mine.toml"


@pytest.mark.parametrize("named", ["imported", "imported/checkpoints/step-00000000"])
def test_weights_alone_give_the_sizes(imported, named):
    found = load(run_file(imported.parent, f'weights = "{named}"')).model
    assert found == WEIGHTS.model_copy(update={"weights": imported.parent / named})


def test_what_the_file_says_otherwise_is_so(imported):
    found = load(run_file(imported.parent, 'weights = "imported"\nmax_seq_len = 9000\nrope_scaling.factor = 4'))
    assert (found.model.layers, found.model.max_seq_len) == (3, 9000)
    assert found.model.rope_scaling == RopeScaling(kind="linear", factor=4.0)


def test_a_preset_beside_them_is_the_model(imported):
    found = load(run_file(imported.parent, 'weights = "imported"\npreset = "llama-5m"')).model
    assert found.layers == load("demo").model.layers != WEIGHTS.layers


def test_weights_given_as_an_option_replace_the_model_of_the_demo_and_not_that_of_a_file(imported):
    mine = run_file(imported.parent, "layers = 2\nwidth = 128")
    assert load(None, {"model.weights": str(imported)}).model.layers == 3
    assert load(mine, {"model.weights": str(imported)}).model.layers == 2


def test_weights_of_which_nothing_is_known_are_refused_unless_the_sizes_are_given(tmp_path):
    with pytest.raises(
        UserError, match=r"mine\.toml:2: model\.weights = .*nowhere: no run\.toml and no config\.json there.*hf://"
    ):
        load(run_file(tmp_path, 'weights = "nowhere"'))
    assert load(run_file(tmp_path, 'weights = "nowhere"\nlayers = 2')).model.layers == 2


CONFIG_JSON = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 80,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
    "max_position_embeddings": 2048, "hidden_act": "silu",
}  # fmt: skip


def test_weights_of_a_hugging_face_folder_give_the_sizes(tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text(json.dumps(CONFIG_JSON))
    for named, kept in (("hub", tmp_path / "hub"), (f"file://{tmp_path}/hub", Path(f"file:{tmp_path}/hub"))):
        run = load(run_file(tmp_path, f'weights = "{named}"\nmax_seq_len = 4096'))
        found = run.model
        assert (found.layers, found.width, found.vocab_size, found.max_seq_len) == (3, 48, 101, 4096)
        assert found.weights == kept
        save_run(run, tmp_path / "again.toml")
        monkeypatch.setattr("argosy.config.layers.MODEL_FOLDERS", "nothing.is.read.again")
        assert load(tmp_path / "again.toml").model == found
        monkeypatch.undo()


def test_a_hugging_face_folder_of_an_unknown_model_is_refused_by_file_and_key(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON | {"model_type": "gpt2"}))
    with pytest.raises(UserError, match=r'config\.json: model_type = "gpt2"'):
        load(run_file(tmp_path, 'weights = "."'))
