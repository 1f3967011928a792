"""Keys that have another name now: the old one works, with a warning that names the new one."""

import pytest

from argosy.cli.options import parse_run
from argosy.cli.train import Options
from argosy.config.layers import RENAMED
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.section import dotted, key_fields
from argosy.errors import ArgosyWarning, UserError


@pytest.mark.parametrize(("old", "new"), RENAMED.items(), ids=dotted)
def test_each_old_key_has_gone_and_its_new_one_exists(old, new):
    assert old not in key_fields(RunConfig)
    assert new in key_fields(RunConfig)


def test_an_old_key_of_a_run_file_works_with_a_warning_that_names_the_line_and_the_new_key(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[resilience]\nexamine_s = 2.0\n")
    with pytest.warns(ArgosyWarning, match=r"run\.toml:2: resilience\.examine_s is called .*node_check_s now"):
        run = load(path)
    assert run.resilience.node_check_s == 2.0


def test_an_old_option_works_with_a_warning_that_names_the_new_one():
    with pytest.warns(ArgosyWarning, match=r"--resilience\.beat_timeout_s is called resilience\.heartbeat_timeout_s"):
        _, run = parse_run(["--resilience.beat-timeout-s", "3"], "argosy train", Options)
    assert run.resilience.heartbeat_timeout_s == 3.0


def test_old_and_new_option_together_are_refused():
    with pytest.raises(UserError, match=r"--resilience\.examine_s .* both"):
        parse_run(["--resilience.examine-s=0", "--resilience.node-check-s", "1"], "argosy train", Options)


def test_old_and_new_key_together_are_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[resilience]\nmove_for_speed = true\nmigrate = false\n")
    with pytest.raises(UserError, match=r"run\.toml:2: resilience\.move_for_speed.*both"):
        load(path)


def test_a_key_that_is_gone_is_left_out_where_it_said_what_is_done_now(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[sync]\nmomentum_every = 0\nshards = 2\n")
    assert load(path).sync.shards == 2
    path.write_text("[sync]\nmomentum_every = 3\n")
    with pytest.raises(UserError, match=r"run\.toml:2: sync\.momentum_every = 3: the key is gone; .*\[\[sites\]\]"):
        load(path)
