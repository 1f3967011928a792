"""Addresses and leases have forms, and what is none is refused in words; options of engines are said once."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from argosy.cli.launch import Options
from argosy.config.launch import EngineOptions, LaunchOptions, LeaseUrl, host_and_port, interface_of, read_rank_map
from argosy.config.load import load
from argosy.config.section import meanings
from argosy.config.sync import SiteLaunch, server_name, server_number
from argosy.engines.engine import RunJob
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


@pytest.mark.parametrize(
    "text",
    [
        "node1",
        "node1:",
        ":7100",
        "node1:0",
        "node1:99999",
        "two words:7100",
        "node1..org:7100",
        "fd00::1:7100",
        "[fd00]:7100",
    ],
)
def test_anything_else_is_refused_in_words(tmp_path, text):
    for keys, name in (({"server": text}, "sync.servers[0]"), ({"site": text}, "sites[0].address")):
        with pytest.raises(UserError) as refusal:
            load(run_file(tmp_path, **keys))
        assert f'{name}: "{text}" is no address. Write HOST:PORT, with a port from 1 to 65535' in str(refusal.value)
    with pytest.raises(UserError, match=r"launch\.coordinator"):
        load(None, {"launch.coordinator": text})


@pytest.mark.parametrize(("text", "both"), [("node1:7100", ("node1", 7100)), ("[fd00::1]:7100", ("fd00::1", 7100))])
def test_an_address_is_a_name_or_figures_of_ipv4_and_ipv6(tmp_path, text, both):
    run = load(run_file(tmp_path, server=text, site=text))
    assert host_and_port(run.sites[0].address) == host_and_port(run.sync.servers[0]) == both
    assert load(None, {"launch.coordinator": text}).launch.coordinator == text


@pytest.mark.parametrize(
    ("host", "where"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("node1", "")]
)
def test_who_is_called_from_this_machine_alone_listens_there_alone(host, where):
    assert interface_of(host) == where


def test_a_server_is_found_by_the_name_it_was_given():
    assert (server_name(0), server_number(server_name(41))) == ("server-1", 41)
    assert [server_number(name) for name in ("oslo", "server-0", "server-01", "server-1b")] == [None] * 4


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("folder", LeaseUrl("folder")),
        ("etcd://h1", LeaseUrl("etcd", (("h1", 2379),))),
        ("etcds://h1:1,10.0.0.2,[::1]:3", LeaseUrl("etcd", (("h1", 1), ("10.0.0.2", 2379), ("::1", 3)), is_tls=True)),
        ("etcd://h1/team/llm/", LeaseUrl("etcd", (("h1", 2379),), prefix="team/llm")),
        ("kubernetes://training/llama-7b.v2", LeaseUrl("kubernetes", namespace="training", name="llama-7b.v2")),
    ],
)
def test_each_form_is_taken_apart(text, parsed):
    assert LeaseUrl.parse(text) == parsed


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('lease = "zookeeper://h"', ["launch.lease", '"zookeeper://h" is not one of the forms', "etcd://HOST:PORT"]),
        ('lease = "etcd://"', ["is not one of the forms"]),
        ('lease = "etcd://h1:99999"', ['"h1:99999" is not HOST:PORT']),
        ('lease = "etcd://h1,,h2"', ['"" is not HOST:PORT']),
        ('lease = "etcd://h1..org"', ['"h1..org" is not HOST:PORT']),
        ('lease = "kubernetes://Training/x"', ["kubernetes://NAMESPACE/NAME"]),
        ('lease = "etcd://me:hunter2@h1"', ["ETCDCTL_USER and ETCDCTL_PASSWORD"]),
        ('lease = "etcd://me@h1"', ["launch.lease names a user of etcd", "ETCDCTL_USER"]),
        ('lease = "folder"\ncoordinator = "h:1"', ["launch.lease and coordinator are both given", "give one"]),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(tmp_path, lines, said):
    (tmp_path / "run.toml").write_text(f"[launch]\n{lines}\n")
    with pytest.raises(UserError) as refused:
        load(tmp_path / "run.toml")
    for part in (*said, "run.toml:2"):
        assert part in str(refused.value)
    assert "hunter2" not in str(refused.value)


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
        ('on = "slum"', 'Try "slurm". The engine and its options.'),
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


def test_a_rank_map_says_in_which_order_nodes_get_ranks(tmp_path):
    path = tmp_path / "ranks.txt"
    path.write_text("node3\n\n node1 \nnode2.example.org\n")
    assert read_rank_map(str(path)) == {"node3": 0, "node1": 1, "node2.example.org": 2}
    assert read_rank_map("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb\na\n", "a is listed twice, and a node has one place. Remove line 3"),
        ("a b\n", "is not the name of a node"),
        ("\n", "names no node"),
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "it is not a text file"),
    ],
)
def test_a_bad_rank_map_is_refused(tmp_path, text, message):
    path = tmp_path / "ranks.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f"launch.rank_map = .*{message}"):
        read_rank_map(str(path))


def test_a_pipe_in_place_of_a_rank_map_holds_nobody(tmp_path):
    os.mkfifo(tmp_path / "ranks.txt")
    with pytest.raises(UserError, match=r"launch\.rank_map = .*cannot be read: not a regular file"):
        read_rank_map(str(tmp_path / "ranks.txt"))
