"""Addresses are HOST:PORT, and one that is not is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.load import load
from argosy.errors import UserError

RUN = """
[sync]
servers = ["{server}"]
[[sites]]
name = "oslo"
address = "{site}"
[[sites]]
name = "lyon"
"""
GOOD = "node1.example.org:7100"


def run_file(folder: Path, server: str = GOOD, site: str = GOOD) -> Path:
    path = folder / "run.toml"
    path.write_text(RUN.format(server=server, site=site))
    return path


def test_an_address_is_a_host_and_a_port(tmp_path):
    run = load(run_file(tmp_path))
    assert (run.sync.servers, run.sites[0].address) == ((GOOD,), GOOD)
    assert load(run_file(tmp_path, site="")).sites[0].address == ""


@pytest.mark.parametrize("text", ["node1", "node1:", ":7100", "node1:0", "node1:99999", "two words:7100"])
def test_anything_else_is_refused_in_words(tmp_path, text):
    for keys, name in (({"server": text}, "sync.servers[0]"), ({"site": text}, "sites[0].address")):
        with pytest.raises(UserError) as refusal:
            load(run_file(tmp_path, **keys))
        assert f'{name}: "{text}" is no address. Write HOST:PORT, with a port from 1 to 65535' in str(refusal.value)
    with pytest.raises(UserError, match=r"launch\.coordinator"):
        load(None, {"launch.coordinator": text})
