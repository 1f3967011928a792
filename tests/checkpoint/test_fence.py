"""Only processes of the newest generation of a run commit checkpoints."""

from __future__ import annotations

import pytest

from argosy.checkpoint import fence
from argosy.checkpoint.fence import Fenced


def test_a_generation_is_in_force_until_a_later_one_begins(tmp_path):
    assert fence.is_in_force(tmp_path, 0), "where generations are not counted"
    fence.begin_generation(tmp_path, 2)
    assert fence.is_in_force(tmp_path, 2) and not fence.is_in_force(tmp_path, 1) and not fence.is_in_force(tmp_path, 0)
    fence.begin_generation(tmp_path, 3)
    assert fence.newest_generation(tmp_path) == 3 and not fence.is_in_force(tmp_path, 2)


def test_nothing_is_written_if_the_newest_generation_cannot_be_told(tmp_path):
    (tmp_path / fence.CLAIMS).write_text("no folder")
    assert not fence.is_in_force(tmp_path, 2)


def test_a_process_finds_itself_fenced_although_its_listing_of_names_is_old(tmp_path, monkeypatch):
    """As on NFS, where a client may not see new names for a minute."""
    fence.begin_generation(tmp_path, 1)
    fence.begin_generation(tmp_path, 2)
    monkeypatch.setattr(fence.Claims, "newest", lambda self: 1)
    with pytest.raises(Fenced, match=r"this process is of generation 1"):
        fence.check_generation(tmp_path, 1)


@pytest.mark.parametrize("number", [4, 5])
def test_no_generation_begins_twice_or_after_a_later_one(tmp_path, number):
    fence.begin_generation(tmp_path, 5, "a")
    with pytest.raises(Fenced, match=f"generation 5 of .* has begun, so {number} cannot"):
        fence.begin_generation(tmp_path, number, "b")
    assert fence.is_in_force(tmp_path, 5) and fence.newest_generation(tmp_path) == 5


def test_who_began_a_generation_may_do_so_again(tmp_path):
    """For example if it did not hear of it: the answer was lost."""
    for _ in range(2):
        fence.begin_generation(tmp_path, 5, "a")
    assert fence.is_in_force(tmp_path, 5)


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


@pytest.mark.parametrize("name", fence.OLD_FILES)
def test_a_folder_of_an_older_version_goes_on(tmp_path, name):
    (tmp_path / name).write_text("4\n")
    assert fence.newest_generation(tmp_path) == 4 and not fence.is_in_force(tmp_path, 3)
    with pytest.raises(Fenced, match=r"generation 4 has begun, so 3 cannot"):
        fence.begin_generation(tmp_path, 3)
    fence.begin_generation(tmp_path, 5)
    assert fence.newest_generation(tmp_path) == 5
    assert (tmp_path / name).read_text() == "5\n", "a process of the older version is fenced as well"
