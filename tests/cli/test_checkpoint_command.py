"""`argosy checkpoint`: what there is, whether it is whole, what is deleted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from argosy.checkpoint import fence, store
from argosy.checkpoint.boxes import PLACES
from argosy.checkpoint.checksums import file_sum, signed
from argosy.cli.checkpoint import main
from argosy.errors import UserError
from checkpoint.saving import flip_a_bit, manifest


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 4, the second and third verified."""
    for step in (1, 2, 3, 4):
        partial = fence.partial_folder(tmp_path, step, 0)
        partial.mkdir(parents=True)
        save_file({"model.w": torch.zeros(250 * step)}, partial / "rank-00000.safetensors")
        files = {"rank-00000.safetensors": file_sum(partial / "rank-00000.safetensors")}
        checkpoint = store.commit(partial, manifest(step, tokens=step * 10**6, files=files))
        if step in (2, 3):
            checkpoint.mark_verified()
    return tmp_path


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed(run_dir)]


def test_the_list_says_what_is_verified_and_what_is_damaged(run_dir, capsys):
    (store.step_folder(run_dir, 1) / store.MANIFEST).write_text("{}")
    assert main(["list", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "manifest.json: does not match its own checksum" in lines[0]
    assert [line.split()[-1] for line in lines[1:3]] == ["verified"] * 2 and lines[3].endswith("not verified")
    assert main(["list", str(run_dir), "--json"]) == 0
    rows = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [row["verified"] for row in rows] == [False, True, True, False] and rows[0]["damaged"]
    shard = store.step_folder(run_dir, 3) / "rank-00000.safetensors"
    assert rows[2]["bytes"] == shard.stat().st_size > 3000 and rows[2]["tokens"] == 3_000_000


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_folder_that_has_a_manifest_and_no_step_in_its_name_is_refused(run_dir, action):
    folder = store.step_folder(run_dir, 1).rename(run_dir / "copy")
    with pytest.raises(UserError, match=r"copy: not a checkpoint.*step-00000100"):
        main([action, str(folder)])


def test_what_was_changed_since_it_was_verified_is_not_called_verified(run_dir, capsys):
    verified = store.committed(run_dir)[2]
    damaged = verified.folder / next(iter(verified.manifest.files))
    assert verified.changed_file() is None
    flip_a_bit(damaged, 100)
    main(["list", str(run_dir)])
    assert f"not verified: {damaged.name} was changed since" in capsys.readouterr().out.splitlines()[2]


def test_a_folder_without_a_run_has_no_list(tmp_path, capsys):
    with pytest.raises(UserError, match="neither a run nor a checkpoint"):
        main(["list", str(tmp_path)])
    (tmp_path / "run.toml").write_text("")
    assert main(["list", str(tmp_path)]) == 0
    assert "no committed checkpoint" in capsys.readouterr().out


def test_to_verify_finds_damage_and_marks_what_is_whole(run_dir, capsys):
    flip_a_bit(store.step_folder(run_dir, 3) / "rank-00000.safetensors", 77)
    assert main(["verify", str(run_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(": whole") for line in lines] == [True, True, False, True]
    assert "rank-00000.safetensors does not match its checksum" in lines[2]
    assert [c.is_verified for c in store.committed(run_dir)] == [True, True, True, True]
    assert main(["verify", str(store.step_folder(run_dir, 4))]) == 0


@pytest.mark.parametrize(
    ("shape", "place", "says"),
    [
        ((250,), ["model.w", [500]], "cannot be used: .*Field required"),
        ((250,), ["model.w", [500], [400]], r"put model.w\[0:250\] of shape \[250\] at \[400\] of model.w"),
        ((250,), ["model.w", [500], [0]], "model.w lacks 250 of its 500 numbers there"),
    ],
)
def test_files_with_their_checksums_whose_places_are_wrong_are_not_whole(run_dir, capsys, shape, place, says):
    partial = fence.partial_folder(run_dir, 5, 0)
    partial.mkdir(parents=True)
    path, key = partial / "rank-00000.safetensors", "model.w[0:250]"
    save_file({key: torch.zeros(shape)}, path, {PLACES: json.dumps({key: place})})
    store.commit(partial, manifest(5, files={path.name: file_sum(path)}))
    assert main(["verify", str(run_dir)]) == 1
    *whole, wrong = capsys.readouterr().out.splitlines()
    assert all(line.endswith(": whole") for line in whole)
    assert re.search(says, wrong)
    assert not store.committed(run_dir)[-1].is_verified


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [3, 4]), (2, [2, 3, 4]), (3, [2, 3, 4])])
def test_to_prune_keeps_the_newest_and_what_is_known_to_be_whole(run_dir, capsys, keep_last, kept):
    assert main(["prune", str(run_dir), "--keep-last", str(keep_last)]) == 0
    assert steps(run_dir) == kept
    assert "deleted step-00000001" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["config.json", "run.toml"])
def test_to_prune_a_folder_that_has_no_checkpoints_is_refused_and_writes_nothing(tmp_path, name):
    """Such as that of a whole run of sites, each of which has its own."""
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"no checkpoints there\. Give the folder of a run, or of one of its sites\."):
        main(["prune", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_checkpoint_of_another_format_is_refused(run_dir):
    (store.step_folder(run_dir, 4) / store.MANIFEST).write_bytes(signed({"format": 1, "step": 4}))
    with pytest.raises(UserError, match="reads checkpoints of format 2"):
        main(["verify", str(run_dir)])


def test_a_signed_manifest_that_names_a_file_elsewhere_is_refused_by_name_and_code(run_dir):
    path = store.step_folder(run_dir, 4) / store.MANIFEST
    record = store.committed(run_dir)[3].manifest.to_record()
    path.write_bytes(signed(record | {"files": {"../../outside": record["files"]["rank-00000.safetensors"]}}))
    with pytest.raises(UserError, match=r"step-00000004/manifest\.json: files names '\.\./\.\./outside'") as refused:
        main(["verify", str(run_dir)])
    assert refused.value.exit_code == 2
