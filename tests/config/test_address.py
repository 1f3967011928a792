"""Addresses are HOST:PORT, and one that is not is refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.address import interface_of
from argosy.config.load import load
from argosy.config.servers import server_name, server_number
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


@pytest.mark.parametrize(("host", "where"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("node1", "")])
def test_who_is_called_from_this_machine_alone_listens_there_alone(host, where):
    assert interface_of(host) == where


def test_a_server_is_found_by_the_name_it_was_given():
    assert (server_name(0), server_number(server_name(41))) == ("server-1", 41)
    assert [server_number(name) for name in ("oslo", "server-0", "server-01", "server-1b")] == [None] * 4
