"""A run starts from a Hugging Face folder itself, each rank from its part, under any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.checkpoint.weights import fill_from_folder
from argosy.data.stores.model_folder import ModelFolder
from argosy.errors import UserError
from argosy.models import hf
from argosy.parallel.world import World
from argosy.training.state import TrainState
from tiny import EAGER, decoder, eager, laid_out, run_config

MOE = {
    "family": "mixtral", "ffn_width": 48, "norm_eps": 1e-5,
    "moe": {"experts": 4, "experts_per_token": 2, "expert_ffn_width": 48, "aux_coefficient": 0.01, "balance": "aux"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("theirs") / "model"
    model = decoder(seed=5, **MOE)
    hf.export_folder(model.config, model.state_dict(), out, dtype=torch.float32)
    return out


def filled(world: World, plan: str, folder: Path, model: dict[str, Any]) -> tuple[list[Any], int]:
    """Return this rank's parts as they were filled, and the bytes that were read for them."""
    read, began, read_into = [], list[int](), ModelFolder.read_into

    def counted(self: ModelFolder, name: str, start: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        read_into(self, name, start, buffer)

    laid = laid_out(world, eager(plan), model=model)
    parts = TrainState.begin(laid, eager(plan), run_config(Path("no data"), model=model)).weights()
    ModelFolder.read_into = counted  # type: ignore[method-assign]
    try:
        fill_from_folder(parts, folder, before_each=lambda: began.append(len(read)))
    finally:
        ModelFolder.read_into = read_into  # type: ignore[method-assign]
    assert len(began) == len(parts) and began[-1] > began[0], "it can show progress while it reads"
    return [(box.name, box.offset, part.tolist()) for box, part in parts.items()], sum(read)


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatch=1", "dp_shard=2,zero=3", "dp_shard=2,ep=2", "dp_shard=2"])
def test_each_rank_has_its_part_of_the_folder_and_reads_no_more_than_it_needs(workers, plan, folder):
    whole = decoder(seed=5, **MOE).state_dict()
    total = (folder / "model.safetensors").stat().st_size
    read = []
    for parts, count in workers.run(2, filled, plan, folder, MOE):
        for name, offset, numbers in parts:
            part = torch.tensor(numbers)
            expected = whole[name.removeprefix("model.")]
            for dim, start in enumerate(offset):
                expected = expected.narrow(dim, start, part.shape[dim]) if part.numel() else expected
            assert not part.numel() or torch.equal(part, expected), name
        read.append(count)
    assert sum(read) < (2.4 if plan == "tp=2" else 1.7) * total  # of columns, whole rows are read


def test_a_folder_of_another_model_is_refused_before_anything_is_filled(folder):
    other = {**MOE, "vocab_size": 300}
    state = TrainState.begin(laid_out(World(), EAGER, model=other), EAGER, run_config(Path("no data"), model=other))
    before = {box: part.clone() for box, part in state.weights().items()}
    with pytest.raises(UserError, match=r"of another model: embedding\.weight is \[\d+, \d+\] there and \[300, "):
        fill_from_folder(state.weights(), folder)
    assert all(torch.equal(part, before[box]) for box, part in state.weights().items())
