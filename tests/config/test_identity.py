"""What of a run file a checkpoint depends on.

What cannot be run a second time to the same numbers is refused before anything is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.config.identity import ADDED, check_repeatable, config_sha256, lasting_values
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from tiny import run_config


def test_what_may_change_does_not_change_the_checksum_and_the_rest_does():
    before = config_sha256(load("demo"))
    assert config_sha256(load("demo", {"train.steps": 7, "resilience.migrate": False})) == before
    assert config_sha256(load("demo", {"optimizer.lr": 0.5})) != before


def test_a_key_that_older_versions_did_not_have_counts_only_if_it_says_something_new():
    """The checksum is that of the version without the key: its checkpoints are of the same run file."""
    values = lasting_values(load("demo"))
    assert ADDED.keys() <= values.keys()
    assert all(values[key] == value for key, value in ADDED.items())
    assert config_sha256(load("demo", {"model.qkv_bias": True})) != config_sha256(load("demo"))


TWO = {"sites": [{"name": "A"}, {"name": "B"}]}


def run(**keys: Any) -> RunConfig:
    return RunConfig.model_validate(run_config(Path("/corpus")).model_dump(mode="json") | keys)


def test_a_run_of_one_place_is_repeated() -> None:
    check_repeatable(run(), "run.toml")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({**TWO, "plan": "auto, sync = async"}, "gradients come in another order"),
        (TWO, "run.toml: the run has .*sites"),
        ({**TWO, "site": "B"}, "what the others send"),
    ],
)
def test_what_depends_on_others_is_not(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_repeatable(run(**keys), "run.toml")
