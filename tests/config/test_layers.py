"""Values keep the place where they were written; paths and old names are settled once."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.layers import (
    REMOVED,
    Source,
    file_layer,
    is_removed,
    new_key,
    of_weights,
    override_layer,
    preset_names,
    preset_path,
    run_layer,
)
from argosy.errors import ArgosyWarning, UserError, near_names


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (("model", "width"), "run.toml:3: "),
        (("sites", 0, "name"), "run.toml:9: "),
        (("data", "sources"), "run.toml:5: "),
        (("model", "heads"), "run.toml:2: "),
        (("launch",), "run.toml: "),
    ],
)
def test_a_key_is_placed_at_its_line_or_the_nearest_around_it(key, place):
    lines = {("model",): 2, ("model", "width"): 3, ("data", "sources", 0): 5, ("sites", 0): 9}
    assert Source("run.toml", lines).place(key).text == place
    assert Source("--").place(key).text == "--"


@pytest.mark.parametrize(
    ("written", "settled"),
    [
        ("text", "/runs/text"),
        ("../text", "/text"),
        ("/data/text", "/data/text"),
        ("s3://bucket/text", "s3://bucket/text"),
        ("s3:/bucket/text", "s3:/bucket/text"),
        ("builtin:shakespeare", "builtin:shakespeare"),
        ("source:mine:1", "source:mine:1"),
    ],
)
def test_paths_start_from_the_files_folder_and_urls_stay(written, settled):
    found = run_layer({("data", "sources"): {written: 1.0}}, Source("run.toml"), Path("/runs"))
    assert found["data", "sources"].value == {settled: 1.0}


def test_a_stage_of_the_data_has_sources_too():
    stages = [{"from": 0, "sources": {"text": 1.0}}, {"from": 0.5}]
    found = run_layer({("data", "stages"): stages}, Source("run.toml"), Path("/runs"))
    assert found["data", "stages"].value == [{"from": 0, "sources": {"/runs/text": 1.0}}, {"from": 0.5}]


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"auto": True, "tp": 2}, "auto,tp=2"),
        ({"auto": False, "compile": False, "precision": "bf16"}, "compile=false,precision=bf16"),
    ],
)
def test_a_plan_may_be_a_table(table, text):
    assert run_layer({("plan",): table}, Source("run.toml"), Path("/runs"))["plan",].value == text


def test_an_old_name_is_taken_with_a_warning_but_not_beside_the_new_one():
    old, new = ("resilience", "examine_s"), ("resilience", "node_check_s")
    with pytest.warns(ArgosyWarning, match="run.toml: resilience.examine_s is called resilience.node_check_s now"):
        assert new_key(old, "run.toml: ") == new
    with pytest.raises(UserError, match="and both are given"):
        new_key(old, "run.toml: ", [old, new])
    assert new_key(("model", "width"), "") == ("model", "width")


def test_a_key_that_is_gone_may_say_what_is_done_now():
    ((key, (value, _)),) = REMOVED.items()
    assert is_removed(key, value, "") and not is_removed(("model", "width"), 8, "")
    with pytest.raises(UserError, match="the key is gone"):
        is_removed(key, 3, "")


def test_an_override_may_be_a_table_or_a_value():
    found = override_layer({"model": {"width": 8}, "train.steps": 3}, "--")
    assert {key: entry.value for key, entry in found.items()} == {("model", "width"): 8, ("train", "steps"): 3}


def test_an_unknown_preset_names_near_ones():
    name = preset_names("models")[0]
    assert preset_path("models", name).is_file()
    with pytest.raises(UserError, match=f"did you mean .*{name}"):
        preset_path("models", f"{name}x")
    assert near_names("zzz", ["a", "b"]) == "there are: a, b."


def test_sizes_come_from_the_run_whose_weights_are_taken(tmp_path):
    before, weights = tmp_path / "before", tmp_path / "before" / "checkpoints" / "step-00000001"
    weights.mkdir(parents=True)
    (before / "run.toml").write_text('[model]\nwidth = 8\ninit_std = 0.1\npreset = "x"\n[train]\nsteps = 3\n')
    for place in (before, weights):
        asked = override_layer({"model.weights": str(place)}, "--")
        assert {key: entry.value for key, entry in of_weights(asked).items()} == {("model", "width"): 8}
    assert of_weights({}) == {} and of_weights(asked | override_layer({"model.preset": "x"}, "--")) == {}
    asked = override_layer({"model.weights": str(tmp_path / "none")}, "--")
    with pytest.raises(UserError, match=r"no run.toml and no config.json there says the model's sizes"):
        of_weights(asked)


def test_a_file_has_its_keys_with_their_lines(tmp_path):
    (tmp_path / "run.toml").write_text("[model]\nwidth = 8\n")
    entry = file_layer(tmp_path / "run.toml", "run.toml", tmp_path)["model", "width"]
    assert (entry.value, entry.source.place(("model", "width")).text) == (8, "run.toml:2: ")
