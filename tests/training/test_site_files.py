"""What ranks leave for other sites is all that these need to go on alike."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from argosy.sync.layout import LeftChange
from one_site import run_of, site, train


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_site_that_takes_over_a_state_of_summed_gradients_makes_the_same_next_step(tmp_path: Path, kind: str) -> None:
    sync = {"from_step": 8, "every_steps": 4}
    run = run_of(tmp_path, sync, {"kind": kind})
    one, its_files, its = site(run, tmp_path / "one")
    other, files, mine = site(run, tmp_path / "other")
    for seed in range(3):
        train(one, seed)
    train(other, 9)
    assert one.rounds == 3
    its.want_state.touch()
    its_files.leave_state(2)
    assert its.state_about(2).exists() and not its.want_state.exists()
    shutil.copy(its.state(2), mine.adopted)
    files.adopt(2)
    other.step = other.rounds = 3
    for state in (one, other):
        train(state, 4)
    for piece, twin in zip(one.model.masters, other.model.masters, strict=True):
        assert torch.equal(piece.value, twin.value), piece.name


def test_what_is_sent_is_in_a_checkpoint_until_it_is_agreed_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"every_steps": 4, "fragments": 2, "overlap_steps": 1})
    one, files, sites = site(run, tmp_path / "one")
    for seed in range(2):
        train(one, seed)
    assert one.in_flight() is None
    files.leave_change(0, LeftChange(tokens=1, skipped=[], needs_round=0))
    train(one, 3)
    boxes = one.in_flight()
    assert boxes is not None and {box.name.split(".", 3)[3] for box in boxes} == set(sites.turn(0).shapes)
    other, its_files, its = site(run, tmp_path / "other")
    for box, tensor in other.in_flight_before(boxes).items():
        tensor.copy_(boxes[box])
    its_files.leave_change(0, LeftChange(tokens=1, skipped=[], needs_round=0))
    assert its.change(0).read_bytes() == sites.change(0).read_bytes()
    assert other.in_flight_before([]) == {} and other.in_flight() is None
