"""A model is what its checkpoint holds, whole, or it is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from argosy.checkpoint import store
from argosy.checkpoint.boxes import PLACES
from argosy.checkpoint.store import Checkpoint
from argosy.errors import ArgosyError, ArgosyWarning, UserError
from argosy.inference.evaluate import evaluate
from argosy.inference.huggingface import export_checkpoint
from argosy.inference.loaded_model import generate
from argosy.inference.trained_model import open_checkpoint
from checkpoint.saving import rewrite
from mutations import ODD_VALUES

HEAD = "model.head.weight"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A run with two checkpoints of the same weights."""
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    (newest,) = store.committed(copy)
    older = store.step_folder(copy, newest.step - 1)
    shutil.copytree(newest.folder, older)
    as_of = {**newest.manifest.to_record(), "step": newest.step - 1}
    (older / store.MANIFEST).write_bytes(type(newest.manifest).from_record(as_of).to_bytes())
    (older / store.VERIFIED).unlink(missing_ok=True)
    return copy


def newest(run_dir: Path) -> Checkpoint:
    return store.committed(run_dir)[-1]


def weights(run_dir: Path) -> dict[str, Tensor]:
    return dict(open_checkpoint(run_dir).model(torch.device("cpu")).state_dict())


@pytest.mark.parametrize("use", ["evaluate", "generate", "export"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(run_dir, tmp_path, use):
    rewrite(newest(run_dir), lambda tensors, metadata: tensors.__delitem__(HEAD))
    uses: dict[str, Any] = {
        "evaluate": evaluate,
        "generate": generate,
        "export": lambda path: export_checkpoint(path, tmp_path / "out"),
    }
    with pytest.raises(UserError, match=rf"{newest(run_dir).folder.name} does not fit: {HEAD} is not there\. Name"):
        uses[use](run_dir)
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_tensor_is_not_taken_for_the_whole(run_dir):
    def halve(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        rows, width = tensors[HEAD].shape
        tensors[HEAD] = tensors[HEAD][: rows // 2]
        metadata[PLACES] = json.dumps({HEAD: [HEAD, [rows, width], [0, 0]]})

    rewrite(newest(run_dir), halve)
    with pytest.raises(UserError, match=rf"{HEAD} lacks [\d,]+ of its [\d,]+ numbers"):
        weights(run_dir)


def test_places_that_cannot_be_give_way_to_the_checkpoint_before_and_that_is_said(run_dir):
    expected = weights(run_dir)
    rewrite(newest(run_dir), lambda tensors, metadata: metadata.update({PLACES: "{"}))
    with pytest.warns(ArgosyWarning, match=r"(?s)argosy\.places cannot be used.*Using step-\d+, verified just now"):
        found = weights(run_dir)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(UserError, match=r"cannot be read .*Name the run's folder instead"):
        open_checkpoint(newest(run_dir).folder)


@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")
@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_file_says_of_its_tensors_the_model_is_right_or_refused(run_dir, seed):
    expected, chance = weights(run_dir), random.Random(seed)

    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        name = chance.choice(sorted(name for name in tensors if name.startswith("model.")))
        shape = list(tensors[name].shape)
        place: list[Any] = [name, shape, [0] * len(shape)]
        for _ in range(chance.randrange(3)):
            place[chance.randrange(3)] = chance.choice([*ODD_VALUES, [2**70] * len(shape), [n + 1 for n in shape]])
        match chance.randrange(4):
            case 0:
                del tensors[name]
            case 1:
                tensors[name] = tensors[name][..., :-1]
            case 2:
                tensors[name + "x"] = tensors.pop(name)
        metadata[PLACES] = json.dumps({chance.choice([name, name + "x"]): place})

    rewrite(newest(run_dir), change)
    try:
        found = weights(run_dir)
    except ArgosyError:
        return
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
