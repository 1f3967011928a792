"""The forms of launch.lease, and what is said of others."""

from __future__ import annotations

import pytest

from argosy.config.lease_url import LeaseUrl
from argosy.config.load import load
from argosy.errors import UserError


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
