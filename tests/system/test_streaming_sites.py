"""Fragments of the model take turns, and travel while sites train on; sites sum gradients before they train alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_several_sites import PlainSite, SitesOfARun, simulated, sites  # noqa: F401  (a fixture)

from argosy.checkpoint import store
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.loader import open_data
from argosy.plan.parameters import parameter_table
from argosy.plan.sync import sent_in_turn
from argosy.sync.deal import merged
from commands import Folder

H, FRAGMENTS = 6, 2


def fragment_of(name: str, names: list[str]) -> int:
    """Layer i is in fragment i mod F; what belongs to no layer is dealt out from the last fragment backwards."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) % FRAGMENTS
    loose = [other for other in names if not other.startswith("blocks.")]
    return (FRAGMENTS - 1 - loose.index(name)) % FRAGMENTS


def streamed(run_dir: Path, steps: int, overlap: int, alpha: float) -> dict[str, torch.Tensor]:
    """Streaming DiLoCo of two sites, written plainly in one process (Douillard et al. 2025)."""
    inner = [PlainSite(run_dir) for _ in range(2)]
    run = inner[0].run
    data = open_data(run.data, run.seed, 8)
    loader = data.loader(slice(0, 8))
    agreed = {name: value.clone() for name, value in inner[0].values.items()}
    velocity = {name: torch.zeros_like(value) for name, value in agreed.items()}
    turns = {name: fragment_of(name, list(agreed)) for name in agreed}
    on_its_way: tuple[int, int, dict[str, torch.Tensor]] | None = None

    def changes(names: list[str]) -> dict[str, torch.Tensor]:
        return {name: sum((agreed[name] - site.values[name]) / 2 for site in inner) for name in names}  # type: ignore

    def merge(turn: int, mean: dict[str, torch.Tensor], keep: float) -> None:
        for name, change in mean.items():
            if turns[name] == turn:
                velocity[name] = 0.9 * velocity[name] + change
                agreed[name] -= 0.7 * (change + 0.9 * velocity[name])
            else:
                agreed[name] -= change
            for site in inner:
                site.values[name].copy_(keep * site.values[name] + (1 - keep) * agreed[name])

    for step in range(steps):
        rows = loader.batch(step)
        for place, site in enumerate(inner):
            site.train(rows[place * 4 : place * 4 + 4], data.eod_id)
        done = step + 1
        if on_its_way is not None and (done == on_its_way[0] + overlap or done == steps):
            merge(on_its_way[1], on_its_way[2], alpha)
            on_its_way = None
        turn = (step // (H // FRAGMENTS)) % FRAGMENTS
        if done == steps:
            merge(turn, changes(list(agreed)), 0.0)
        elif done % (H // FRAGMENTS) == 0:
            mean = changes([name for name in agreed if turns[name] == turn])
            if overlap:
                on_its_way = (done, turn, mean)
            else:
                merge(turn, mean, alpha)
    loader.close()
    return agreed


STEPS = 2 * H + 1
"""The last round has one step: what was sent before it has not come when the run's last step is made."""


def keys(overlap: int = 2, mixing: float = 0.5, **others: Any) -> dict[str, Any]:
    return {"every_steps": H, "fragments": FRAGMENTS, "overlap_steps": overlap, "mixing": mixing, **others}


def run_of(run: SitesOfARun) -> RunConfig:
    return load(run.path("A") / "run.toml")


def outer_lines(site: Path) -> list[tuple[int, dict[str, Any]]]:
    """Steps done, and the line, of each outer step that metrics have."""
    lines = [json.loads(line) for line in (site / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"] + 1, line["sites"]) for line in lines if "sites" in line]


def train(folder: Folder, steps: int = STEPS, **sync: Any) -> SitesOfARun:
    """A run of two sites that is left alone."""
    run = SitesOfARun(folder, steps=steps, sync=sync)
    for name in run.names:
        run.start(name)
    run.end()
    return run


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> SitesOfARun:
    """Both sites are started by one command."""
    run = SitesOfARun(Folder(tmp_path_factory.mktemp("alone"), corpus), steps=STEPS, sync=keys())
    said = run.folder.argosy("train", "run.toml")
    assert "A | " in said and "B | " in said and "done" in said
    return run


def check_weights(run: SitesOfARun, overlap: int, mixing: float) -> None:
    got, wanted = run.same_weights(), streamed(run.path("A"), STEPS, overlap, mixing)
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)  # Adam makes much of little


def test_sites_come_to_the_weights_of_a_simulation_in_one_process(undisturbed: SitesOfARun) -> None:
    check_weights(undisturbed, 2, 0.5)
    assert [list(line.tokens) for line in undisturbed.check_ledger().lines] == [["A", "B"]] * 5
    outer = outer_lines(undisturbed.path("B"))
    assert [(done, one["round"], one["fragment"]) for done, one in outer] == [
        (3 + 2, 0, 0), (6 + 2, 1, 1), (9 + 2, 2, 0), (STEPS, 4, 0),
    ]  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in undisturbed.same_weights().items()}
    turns = sent_in_turn({name: shapes[name] for name in parameter_table(run_of(undisturbed).model)},
                         run_of(undisturbed).sync, 2)  # fmt: skip
    assert [one["sent_bytes"] for _, one in outer[:3]] == [turns[0], turns[1], turns[0]]
    assert all(one["distance"] > 0 for _, one in outer)
    assert [one["steps"] for _, one in outer] == [3, 3, 3, 4]
    assert [one["staleness_steps"] for _, one in outer[:3]] == [3, 6, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "mixing"), [(0, 0.0), (0, 0.5), (1, 0.0)])
def test_so_they_do_whatever_the_overlap(folder: Folder, overlap: int, mixing: float) -> None:
    check_weights(train(folder, **keys(overlap, mixing)), overlap, mixing)


@pytest.mark.slow
def test_one_fragment_without_overlap_is_diloco_bit_for_bit(folder: Folder, tmp_path: Path) -> None:
    plain = train(folder, every_steps=H)
    one = train(Folder(tmp_path, folder.corpus), **{**keys(0, 0.0), "fragments": 1})
    got, wanted = one.same_weights(), plain.same_weights()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
    check_diloco(plain)


def check_diloco(run: SitesOfARun) -> None:
    wanted = simulated(run.path("A"), "AB", STEPS, H, 0.7, 0.9)
    for name, value in run.same_weights().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def test_a_run_whose_last_round_was_about_all_fragments_is_not_made_longer(undisturbed: SitesOfARun) -> None:
    folder, longer = undisturbed.folder, ("--train.steps", 2 * STEPS)
    run_files = list((folder.path / "runs/tiny").rglob("run.toml"))
    before = [path.read_text() for path in run_files]
    for command in (("train", "run.toml", "--site", "A", *longer), ("train", "run.toml", *longer)):
        said = folder.argosy_here(*command, code=2)
        assert f"has made round 4 of a run with train.steps = {STEPS}" in said and f"Keep train.steps = {STEPS}" in said
    assert len(before) == 3 and [path.read_text() for path in run_files] == before


@pytest.mark.slow
def test_a_run_of_whole_rounds_is_made_longer_to_the_bits_of_one_that_was_as_long(
    folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    constant = ("--schedule.kind", "constant")
    at_once, longer = (
        SitesOfARun(Folder(path, folder.corpus), steps=steps, sync={"every_steps": 3, "wire": "int8"})
        for path, steps in ((tmp_path_factory.mktemp("at-once"), 12), (folder.path, 6))
    )
    for run in (at_once, longer):
        for name in run.names:
            run.start(name, *constant)
        run.end()
    for name in longer.names:
        longer.start(name, *constant, "--train.steps", 12)
    longer.end()
    assert len(longer.check_ledger().lines) == 4
    got = longer.same_weights()
    assert all(torch.equal(got[name], value) for name, value in at_once.same_weights().items())


@pytest.mark.slow
def test_a_fragment_in_flight_is_in_checkpoints(
    sites: Callable[..., SitesOfARun],  # noqa: F811
    undisturbed: SitesOfARun,
) -> None:
    run = sites(steps=STEPS, sync=keys())
    alone = run.start("B", "--checkpoint.every-steps", 1)
    run.wait(lambda: [c.step for c in store.committed(run.path("B"))][-1:] == [4])  # sent after 3, due after 5
    run.kill(alone)
    shutil.rmtree(run.path("B") / "exchange")
    for name in run.names:
        run.start(name, "--checkpoint.every-steps", 1)
    run.end()
    assert all(list(line.tokens) == ["A", "B"] for line in run.check_ledger().lines)
    got = run.same_weights()
    assert all(torch.equal(got[name], value) for name, value in undisturbed.same_weights().items())


@pytest.mark.slow
def test_sites_that_are_killed_at_any_moment_change_no_bit(
    sites: Callable[..., SitesOfARun],  # noqa: F811
    corpus: Path,
    tmp_path: Path,
) -> None:
    steps = 10 * H
    undisturbed = train(Folder(tmp_path, corpus), steps, **keys(wire="int4"))
    run = sites(steps=steps, sync=keys(wire="int4"))
    processes = {each: run.start(each) for each in run.names}
    for rounds, name in ((3, "A"), (7, "B"), (11, "A")):
        run.wait(lambda rounds=rounds: len(run.ledger("B").lines) >= rounds)  # type: ignore[misc]
        run.kill(processes[name])
        processes[name] = run.start(name)
    run.end()
    assert all(list(line.tokens) == ["A", "B"] for line in run.check_ledger().lines)
    got = run.same_weights()
    assert all(torch.equal(got[name], value) for name, value in undisturbed.same_weights().items())


@pytest.mark.slow
def test_the_others_go_on_without_a_site_and_it_comes_back(sites: Callable[..., SitesOfARun]) -> None:  # noqa: F811
    run = sites(names="ABC", steps=15 * H, sync=keys(patience_s=4.0))
    options = ("--train.global-batch", 12, "--checkpoint.every-steps", 6)
    processes = {name: run.start(name, *options) for name in run.names}
    run.wait(lambda: len(run.ledger("C").lines) >= 4)
    run.kill(processes["C"])
    run.wait(lambda: any("C" not in line.tokens for line in run.ledger("B").lines))
    run.start("C", *options)
    run.end(240)
    ledger = run.check_ledger()
    present = ["C" in line.tokens for line in ledger.lines]
    assert present[0] and present[-1] and not all(present)
    run.same_weights()


FROM_STEP = 4


def post_local(run_dir: Path) -> dict[str, torch.Tensor]:
    """One process that trains on the whole batch, and DiLoCo of two sites after that (Lin et al. 2018)."""
    inner = [PlainSite(run_dir) for _ in range(2)]
    run = inner[0].run
    data = open_data(run.data, run.seed, 8)
    loader = data.loader(slice(0, 8))
    agreed: dict[str, torch.Tensor] = {}
    velocity = {name: torch.zeros_like(value) for name, value in inner[0].values.items()}
    for step in range(STEPS):
        rows = loader.batch(step)
        if step == FROM_STEP:
            agreed = {name: value.clone() for name, value in inner[0].values.items()}
        for place, site in enumerate(inner):
            site.train(rows if step < FROM_STEP else rows[place * 4 : place * 4 + 4], data.eod_id)
        if step >= FROM_STEP and ((step + 1 - FROM_STEP) % 3 == 0 or step + 1 == STEPS):
            for name, value in agreed.items():
                change = sum((value - site.values[name]) / 2 for site in inner)
                velocity[name] = 0.9 * velocity[name] + change
                value.sub_(0.7 * (change + 0.9 * velocity[name]))
                for site in inner:
                    site.values[name].copy_(value)
    loader.close()
    return agreed


@pytest.mark.slow
def test_sites_sum_gradients_before_they_train_alone(sites: Callable[..., SitesOfARun]) -> None:  # noqa: F811
    run = sites(steps=STEPS, sync={"every_steps": 3, "from_step": FROM_STEP, "wire": "fp32"})
    for name, step in (("A", 2), ("B", 3)):
        run.start(name, ARGOSY_FAULTS=f"kill@commit:step={step}")
    run.end()
    ledger = run.check_ledger()
    assert [sum(end - first for first, end in merged(line.samples["A"])) for line in ledger.lines[:5]] == [4] * 4 + [12]
    got = run.same_weights()
    for name, value in post_local(run.path("A")).items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
