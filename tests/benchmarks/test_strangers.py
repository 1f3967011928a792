"""`benchmarks/planner/strangers.py`: whoever is scored taught nothing, neither constants nor widths."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PLANNER = Path(__file__).parents[2] / "benchmarks/planner"


@pytest.fixture
def planner(monkeypatch):
    """The folder's modules, which import each other by name."""
    monkeypatch.syspath_prepend(PLANNER)
    import rows
    import strangers
    import systems

    yield SimpleNamespace(rows=rows, strangers=strangers, systems=systems)
    for name in ("rows", "strangers", "systems"):
        sys.modules.pop(name, None)


def of(family: str, device: str) -> SimpleNamespace:
    return SimpleNamespace(family=family, device=device)


PUBLISHED = [
    of("NVIDIA-NeMo/Megatron-Bridge", "B200"),
    of("Narayanan", "A100-80"),
    of("pytorch/torchtitan", "H100-SXM"),
    of("mosaicml/llm-foundry", "A100-40"),
    of("AMD-AGI/Primus", "MI325X"),
]


def taught(planner, rows, without=""):
    """Return the families that each row's constants were fitted to."""
    fits = []

    def fit(chosen):
        fits.append({PUBLISHED[i].family for i in np.flatnonzero(chosen)})
        return len(fits) - 1

    strangers = planner.strangers.Strangers(PUBLISHED, fit, lambda some, index: np.full(len(some), float(index)))
    return [fits[int(index)] for index in strangers.errors(rows, without)]


def test_constants_know_neither_the_lineage_nor_the_generation(planner):
    ours, new = taught(planner, [of("yanring/Megatron-MoE-ModelZoo", "H100-SXM"), of("Somebody", "GB300")])
    assert ours == {"mosaicml/llm-foundry", "AMD-AGI/Primus"}  # not NVIDIA's publishers, not the other H100
    assert new == {row.family for row in PUBLISHED[1:]}


def test_widths_for_a_lineage_come_from_constants_that_do_not_know_it_either(planner):
    (found,) = taught(planner, [of("AMD-AGI/Primus", "MI355X")], without="FSDP")
    assert found == {"NVIDIA-NeMo/Megatron-Bridge", "Narayanan"}


def test_rows_of_one_publisher_count_as_the_root_of_their_number(planner):
    weights = planner.strangers.publisher_weights([of("a", "")] * 4 + [of("b", "")])
    assert weights.tolist() == [0.5] * 4 + [1.0]


@pytest.mark.parametrize(("share", "value"), [(0.5, 1.0), (0.9, 3.0)])
def test_a_quantile_counts_weights(planner, share, value):
    assert planner.strangers.weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([2.0, 5.0, 1.0]), share) == value


def test_every_published_row_has_a_lineage_and_a_generation(planner):
    with (PLANNER / "published.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    found = {planner.strangers.generation(of("", cell["gpu"])) for cell in cells}
    assert found == set(planner.strangers.GENERATIONS)


@pytest.mark.parametrize(
    ("source", "changes", "system"),
    [
        ("mosaicml/llm-foundry scripts", {}, "FSDP1"),  # not how fast its attention was
        ("InternLM/InternEvo doc", {"zero_stage": "1"}, "MEGATRON_CORE"),  # not what its optimizer keeps
        ("pytorch/torchtitan", {"notes": "torch.compile"}, "FSDP"),
        ("Korthikanti et al. 2022", {"sp": "false"}, "MEGATRON_2021"),
    ],
)
def test_a_stranger_tells_the_framework_and_what_stands_in_the_row(planner, source, changes, system):
    cell = {"source": source, "notes": "", "sp": "", "gpu": "H100-SXM", "zero_stage": "", "model": "", "ep": ""}
    expected = vars(getattr(planner.systems, system)) | {"even_experts": 1.0}
    told = vars(planner.systems.system_of(cell | changes, recipes=False))
    assert {key: value for key, value in told.items() if key != "sends_once"} == {
        key: value for key, value in expected.items() if key != "sends_once"
    }


def test_what_recipes_say_elsewhere_is_left_out(planner):
    with (PLANNER / "published.csv").open(newline="") as file:
        cells = {cell["id"]: cell for cell in csv.DictReader(file)}
    with pytest.raises(planner.rows.Skip, match="256 data-parallel ranks, and a batch of"):
        planner.rows.row_of(cells["tpu-013"], recipes=False)
    captured = next(c for c in cells.values() if "Megatron-Bridge" in c["source"] and "tokendrop" in c["notes"])
    assert planner.rows.row_of(captured).system.launched == 0
    assert planner.rows.row_of(captured, recipes=False).system.launched == 1
