"""What every backend of the lease promises, and what each of them adds."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from argosy.errors import UserError
from argosy.supervise.lease import etcd as etcd_module
from argosy.supervise.lease import kubernetes as kubernetes_module
from argosy.supervise.lease import lease as lease_module
from argosy.supervise.lease.etcd import EtcdLease
from argosy.supervise.lease.lease import Holder, Lease, LeaseLost, LeaseUnreachable
from argosy.supervise.place import open_lease
from etcd import WHERE_FROM, Etcd, etcd, is_installed
from kubernetes_api import Api, kubernetes_api
from waiting import PATIENT_S, wait_until

ETCD_TTL_S, TTL_S = 2.0, 0.8
"""The least that etcd takes; of the others."""
A, B, C = (Holder(name, "127.0.0.1", port) for port, name in enumerate("abc", 1000))
needs_etcd = pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
Open = Callable[..., Lease]


@pytest.fixture(scope="module")
def three_etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with kubernetes_api(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        yield server


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "TTL_S", ETCD_TTL_S)
    monkeypatch.setattr(kubernetes_module, "TTL_S", TTL_S)
    monkeypatch.setattr(lease_module, "TTL_S", TTL_S)


@pytest.fixture(params=["folder", pytest.param("etcd", marks=needs_etcd), "kubernetes"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the lease of one run, each time as another process would."""
    text = request.param
    if text == "etcd":
        text = request.getfixturevalue("three_etcds").url
    elif text == "kubernetes":
        request.getfixturevalue("api")
        text = "kubernetes://training/run"
    yield lambda token="": open_lease(text, tmp_path, token)


def test_one_holds_it_and_all_can_look_up_where_it_is(opened):
    a, b = opened(), opened()
    assert a.holder() is None
    assert a.acquire(A) and not b.acquire(B) and not b.token
    assert opened().holder() == b.holder() == A and A.address == ("127.0.0.1", 1000)


def test_of_many_that_want_it_one_gets_it(opened):
    leases, holders = [opened() for _ in range(12)], [Holder(f"h{n}", "127.0.0.1", n + 1) for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(lambda pair: pair[0].acquire(pair[1]), zip(leases, holders, strict=True)))
    assert sum(got) == 1
    assert leases[0].holder() == holders[got.index(True)]


def test_what_is_given_up_is_free_at_once(opened):
    a, b = opened(), opened()
    assert a.acquire(A)
    a.release()
    assert b.holder() is None and b.acquire(B)
    with pytest.raises(LeaseLost):
        a.renew()
    assert opened().holder() == B


def test_it_ends_unless_it_is_renewed_and_then_its_holder_can_do_nothing(opened):
    a, b = opened(), opened()
    assert a.acquire(A)
    renewed_until = time.monotonic() + 1.5 * (ETCD_TTL_S if isinstance(a, EtcdLease) else TTL_S)
    while time.monotonic() < renewed_until:
        a.renew()
        assert b.holder() == A
        time.sleep(0.1)
    wait_until(lambda: b.holder() is None)
    assert b.acquire(B)
    for does in (a.renew, lambda: a.check(7)):
        with pytest.raises(LeaseLost):
            does()
    with pytest.raises(LeaseLost):
        a.release()
        a.renew()
    b.check(7)
    assert opened().holder() == B


def test_a_dead_coordinator_s_agent_gets_it_back_at_once_and_fences_it_all_the_same(opened):
    first, second = opened(), opened()
    assert first.acquire(A) and second.acquire(Holder("a", "127.0.0.1", 2000))
    with pytest.raises(LeaseLost):
        first.check(3)
    second.check(3)
    assert opened().holder() == Holder("a", "127.0.0.1", 2000)


def test_another_process_goes_on_holding_it(opened):
    agent = opened()
    assert agent.acquire(A)
    coordinator = opened(agent.token)
    coordinator.renew()
    coordinator.check(1)
    assert opened().holder() == A
    coordinator.release()
    assert opened().holder() is None


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_gone_is_unreachable(tmp_path):
    a = open_lease("folder", tmp_path)
    assert a.acquire(A)
    (tmp_path / ".coordinators").rename(tmp_path / "elsewhere")
    (tmp_path / ".coordinators").write_text("")
    with pytest.raises(LeaseUnreachable):
        a.holder()
    with pytest.raises(LeaseUnreachable):
        a.renew()


def test_a_renewal_in_a_folder_needs_no_more_room_on_the_disk(tmp_path):
    a = open_lease("folder", tmp_path)
    assert a.acquire(A)
    a.renew()
    (file,) = (tmp_path / ".coordinators").glob("renewed-*")
    file.write_text("1234")
    a.renew()
    assert file.read_text() == "2234", "a file that is cut off first gives its room to others"


# ---- etcd ------------------------------------------------------------------------------------------------------------


@needs_etcd
def test_one_etcd_of_three_may_be_lost_and_two_may_not(tmp_path):
    with etcd(tmp_path) as cluster:
        a, b = open_lease(cluster.url, tmp_path), open_lease(cluster.url, tmp_path)
        assert a.acquire(A)
        cluster.kill(0)
        wait_until(lambda: _renews(a))
        assert _patiently(b.holder) in (A, None)
        assert _patiently(lambda: a.acquire(A))
        cluster.kill(1)
        for does in (a.renew, lambda: a.check(1), b.holder, lambda: b.acquire(B)):
            with pytest.raises(LeaseUnreachable, match="etcd does not answer"):
                does()
        cluster.start(0, 1)
        wait_until(lambda: _patiently(lambda: a.acquire(A) or b.acquire(B)))


def _renews(lease: Lease) -> bool:
    try:
        lease.renew()
    except (LeaseUnreachable, LeaseLost):
        return False
    return True


def _patiently(does: Callable[[], object]) -> object:
    """What it returns, once etcd has chosen a leader."""
    end = time.monotonic() + 20
    while True:
        try:
            return does()
        except LeaseUnreachable:
            assert time.monotonic() < end
            time.sleep(0.2)


@needs_etcd
@pytest.mark.slow
def test_one_etcd_that_stands_still_costs_a_second(tmp_path):
    with etcd(tmp_path) as cluster:
        a = open_lease(cluster.url, tmp_path)
        assert a.acquire(A)
        stopped = cluster.processes[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_until(lambda: _renews(a))
        finally:
            os.kill(stopped, signal.SIGCONT)


@needs_etcd
def test_etcd_over_tls_for_those_who_have_a_password(tmp_path, monkeypatch):
    certificate, key = self_signed(tmp_path)
    options = ("--cert-file", str(certificate), "--key-file", str(key))
    with etcd(tmp_path, options, scheme="https") as cluster:
        _require_a_password(cluster.ports[0], certificate)
        monkeypatch.setenv(etcd_module.CA_VARIABLE, str(certificate))
        monkeypatch.setattr(etcd_module, "ETCD_TIMEOUT_S", 10.0)  # a password is made slow to check
        with pytest.raises(LeaseUnreachable, match="user name is empty"):
            open_lease(cluster.url, tmp_path).holder()
        monkeypatch.setenv(etcd_module.USER, "root:wrong")
        with pytest.raises(LeaseUnreachable, match="authentication failed"):
            open_lease(cluster.url, tmp_path).holder()
        monkeypatch.setenv(etcd_module.USER, "root")
        monkeypatch.setenv(etcd_module.PASSWORD, "hunter2")
        a = open_lease(cluster.url, tmp_path)
        wait_until(lambda: _patiently(lambda: a.acquire(A)))
        _end_sessions(cluster.ports[0], certificate)
        assert _patiently(lambda: open_lease(cluster.url, tmp_path).holder()) in (A, None)
        wait_until(lambda: _patiently(lambda: a.acquire(A)))
        monkeypatch.delenv(etcd_module.CA_VARIABLE)
        with pytest.raises(LeaseUnreachable, match="certificate"):
            open_lease(cluster.url, tmp_path).holder()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, and its key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "etcd.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "etcd.key").write_bytes(private)
    return folder / "etcd.pem", folder / "etcd.key"


def _require_a_password(port: int, certificate: Path) -> None:
    with requests.Session() as session:
        session.trust_env, session.verify = False, str(certificate)
        for path, facts in (
            ("user/add", {"name": "root", "password": "hunter2"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            session.post(f"https://127.0.0.1:{port}/v3/auth/{path}", json=facts, timeout=PATIENT_S).raise_for_status()


def _end_sessions(port: int, certificate: Path) -> None:
    """Set the password anew, with which tokens end that etcd has given out."""
    who = {"name": "root", "password": "hunter2"}
    with requests.Session() as session:
        session.trust_env, session.verify = False, str(certificate)

        def ask(path: str) -> requests.Response:
            return session.post(f"https://127.0.0.1:{port}/v3/auth/{path}", json=who, timeout=PATIENT_S)

        session.headers["Authorization"] = ask("authenticate").json()["token"]
        ask("user/changepw").raise_for_status()
        assert not ask("user/changepw").ok


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def test_an_object_that_somebody_edits_is_renewed_all_the_same(api, tmp_path):
    a = open_lease("kubernetes://training/run", tmp_path)
    assert a.acquire(A)
    api.edit("run", team="llm")
    a.renew()
    a.check(4)
    lease = api.objects["run"]
    assert (
        lease["metadata"]["labels"] == {"team": "llm"} and lease["metadata"]["annotations"]["argosy/generation"] == "4"
    )
    assert lease["spec"]["holderIdentity"] == "a" and lease["spec"]["leaseDurationSeconds"] == 1


def test_an_object_that_somebody_has_created_by_hand_is_free(api, tmp_path):
    api.objects["run"] = {"metadata": {"name": "run", "resourceVersion": "1"}}
    a = open_lease("kubernetes://training/run", tmp_path)
    assert a.holder() is None and a.acquire(A) and a.holder() == A


def test_a_lease_of_another_run_is_refused_while_it_is_held(api, tmp_path):
    (tmp_path / "other").mkdir()
    other, mine = (open_lease("kubernetes://training/run", folder) for folder in (tmp_path / "other", tmp_path))
    assert other.acquire(A)
    for does in (mine.holder, lambda: mine.acquire(B)):
        with pytest.raises(UserError, match=r"kubernetes://training/run is held by another run.*a lease of its own"):
            does()
    other.release()
    assert mine.acquire(B)


def test_what_kubernetes_refuses_is_said(api, tmp_path):
    with pytest.raises(LeaseUnreachable, match="404"):
        open_lease("kubernetes://nowhere/run", tmp_path).acquire(A)
    api.forbidden = True
    with pytest.raises(LeaseUnreachable, match=r"403.*needs get, create and update of leases"):
        open_lease("kubernetes://training/run", tmp_path).holder()


def test_an_api_server_that_is_gone_is_unreachable(tmp_path, monkeypatch):
    with kubernetes_api(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        a = open_lease("kubernetes://training/run", tmp_path)
        assert a.acquire(A)
    with pytest.raises(LeaseUnreachable, match="does not answer"):
        a.renew()


def test_without_a_way_to_the_api_server_the_user_is_told_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UserError, match="set KUBECONFIG"):
        open_lease("kubernetes://training/run", tmp_path)
