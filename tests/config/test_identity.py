"""What of a run file a checkpoint depends on."""

from argosy.config.identity import ADDED, config_sha256, lasting_values
from argosy.config.load import load


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
