"""README.md of exported models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.inference.huggingface import export_checkpoint, import_checkpoint


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def with_weights(run_dir: Path, weights: str) -> None:
    run = load(run_dir / "run.toml")
    prepare = run.data.prepare.model_copy(update={"input": ("hf://datasets/HuggingFaceFW/fineweb-edu/sample", "a.txt")})
    data = run.data.model_copy(update={"prepare": prepare})
    model = run.model.model_copy(update={"weights": Path(weights)})
    save_run(run.model_copy(update={"model": model, "data": data}), run_dir / "run.toml")


def card_in(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def test_the_card_says_what_the_run_knows(run_dir: Path, tmp_path: Path) -> None:
    with_weights(run_dir, "hf://Qwen/Qwen3-0.6B@main")
    export_checkpoint(run_dir, tmp_path / "out", license_name="apache-2.0")
    card = card_in(tmp_path / "out")
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["HuggingFaceFW/fineweb-edu"]
    for words in ("| steps | 40 |", "| tokens | ", "| training loss | ", "| validation loss | ", "| plan | `", "a.txt"):
        assert words in card.text
    assert str(run_dir.parent) not in card.text  # paths of this machine say nothing to others


def test_without_a_license_it_is_unknown(run_dir: Path, tmp_path: Path) -> None:
    export_checkpoint(run_dir, tmp_path / "out", format="gguf")
    card = card_in(tmp_path / "out")
    assert card.data.license == "unknown" and card.data.library_name == "gguf" and card.data.base_model is None


def test_a_readme_of_the_users_is_taken_unless_told_otherwise(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "README.md").write_text("mine\n")
    export_checkpoint(run_dir, tmp_path / "kept")
    assert (tmp_path / "kept" / "README.md").read_text() == "mine\n"
    export_checkpoint(run_dir, tmp_path / "anew", overwrite=True)
    assert "| steps | 40 |" in (tmp_path / "anew" / "README.md").read_text()
    assert (run_dir / "README.md").read_text() == "mine\n"


def test_the_card_of_the_weights_is_kept_beside_that_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    export_checkpoint(run_dir, tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\ntheirs\n")
    import_checkpoint(tmp_path / "base", tmp_path / "imported")
    assert (tmp_path / "imported" / "README-base.md").read_text().endswith("theirs\n")
    export_checkpoint(tmp_path / "imported", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text().endswith("theirs\n")  # nothing was trained
    assert not (tmp_path / "again" / "README-base.md").exists()
    shutil.copy(tmp_path / "imported" / "README-base.md", run_dir)  # as a run that starts from these weights has it
    export_checkpoint(run_dir, tmp_path / "tuned")
    assert (tmp_path / "tuned" / "README-base.md").read_text().endswith("theirs\n")
    assert "[README-base.md](README-base.md)" in (tmp_path / "tuned" / "README.md").read_text()
