"""What cannot be run a second time to the same numbers is refused before anything is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argosy.config.repeatable import check_repeatable
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from tiny import run_config

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
