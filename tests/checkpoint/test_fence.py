"""Only processes of the newest generation of a run commit checkpoints."""

from __future__ import annotations

import pytest

from argosy.checkpoint import fence
from argosy.checkpoint.fence import Fenced


def test_a_generation_is_in_force_until_a_later_one_begins(tmp_path):
    assert fence.is_in_force(tmp_path, 0), "where generations are not counted"
    fence.begin_generation(tmp_path, 2)
    assert fence.is_in_force(tmp_path, 2) and not fence.is_in_force(tmp_path, 1)
    (tmp_path / fence.GENERATION_FILE).write_text("no number")
    assert not fence.is_in_force(tmp_path, 2), "if that cannot be told, nothing is written"


def test_folders_of_older_generations_lose_their_names_when_a_new_one_begins(tmp_path):
    for generation in (1, 2, 3):
        fence.partial_folder(tmp_path, 4, generation).mkdir(parents=True)
    fence.begin_generation(tmp_path, 3)
    assert fence.partial_folders(tmp_path) == [(fence.partial_folder(tmp_path, 4, 3), 4, 3)]
    with pytest.raises(Fenced, match=r"generation 3 of .* has begun"):
        fence.check_generation(tmp_path, 2)


def test_a_process_belongs_to_the_generation_that_its_environment_names(monkeypatch):
    monkeypatch.delenv(fence.GENERATION, raising=False)
    assert fence.own_generation() == 0
    monkeypatch.setenv(fence.GENERATION, "7")
    assert fence.own_generation() == 7


def test_a_folder_from_before_generations_were_called_so_goes_on(tmp_path):
    (tmp_path / ".epoch").write_text("4\n")
    assert fence.newest_generation(tmp_path) == 4
    fence.begin_generation(tmp_path, 5)
    assert fence.newest_generation(tmp_path) == 5
    assert (tmp_path / ".epoch").read_text() == "5\n", "a process of the older version is fenced as well"
