"""A model that starts from weights has their sizes."""

from __future__ import annotations

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
        UserError, match=r"mine\.toml:2: model\.weights = .*nowhere: no run\.toml there.*checkpoint import"
    ):
        load(run_file(tmp_path, 'weights = "nowhere"'))
    assert load(run_file(tmp_path, 'weights = "nowhere"\nlayers = 2')).model.layers == 2
