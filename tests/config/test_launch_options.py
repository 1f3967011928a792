"""The options of `argosy launch` are said once, and hold in each of the places that take them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from argosy.cli.launch import Options
from argosy.config.launch_options import EngineOptions, LaunchOptions
from argosy.config.load import load
from argosy.config.section import meanings
from argosy.config.sites import SiteLaunch
from argosy.engines.engine import RunJob
from argosy.errors import UserError

NAMES = {field.name for field in fields(LaunchOptions)}


@pytest.mark.parametrize("form", [Options, SiteLaunch])
def test_command_line_and_a_sites_table_take_them_with_the_same_meaning(form: type) -> None:
    assert {name: text for name, text in meanings(form).items() if name in NAMES} == meanings(LaunchOptions)
    assert set(meanings(LaunchOptions)) == NAMES
    assert {name: getattr(form(), name) for name in NAMES} == vars(LaunchOptions())


def test_a_request_takes_what_a_sites_table_asks_of_an_engine() -> None:
    asked = SiteLaunch(on="slurm", nodes=4, time="1:00:00", extra=("--qos=long",)).for_engine()
    assert asked == vars(EngineOptions(nodes=4, time="1:00:00", extra=("--qos=long",)))
    assert set(asked) <= {field.name for field in fields(RunJob)}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("nodes = 0", "sites[0].launch.nodes = 0: must be a whole number above 0."),
        ('on = "slum"', 'Try "slurm". Where it is to run.'),
        ('address = "http://me:secret@head:8265"', "credentials"),
        ("node = 2", "sites[0].launch.node = 2: unknown key; did you mean launch.nodes?"),
    ],
)
def test_a_sites_table_is_checked_as_the_run_file_is(tmp_path: Path, written: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text("".join(f'[[sites]]\nname = "{name}"\n[sites.launch]\n{written}\n' for name in ("oslo", "lyon")))
    with pytest.raises(UserError) as refused:
        load(str(path))
    assert message in str(refused.value) and "me:secret" not in str(refused.value)
