"""The lease in etcd: the coordinator's machine may be lost, and so may a minority of etcd's.

The holder is one key, bound to a lease of etcd's, which deletes it when it is not kept alive. Whoever does something
as the holder compares the key's revision in the same transaction; so it is nothing that a successor does not know of.
etcd is asked through its JSON gateway, with OpenStack's client.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

from argosy.errors import UserError, missing_extra
from argosy.supervise.lease.lease import TTL_S, Holder, LeaseLost, LeaseUnreachable

ETCD_TIMEOUT_S = 1.5
"""One of etcd's machines that does not answer for this long is left for the next. All of three are asked well within
the time in which a lease has to be renewed."""
CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"
USER, PASSWORD = "ETCDCTL_USER", "ETCDCTL_PASSWORD"
"""Environment variables, as `etcdctl` takes them: files for TLS, and NAME or NAME:PASSWORD."""

T = TypeVar("T")


class EtcdLease:
    """A `Lease` in etcd; its token is etcd's lease and the revision of the holder's key."""

    def __init__(self, endpoints: list[tuple[str, int]], prefix: str, run: str, is_tls: bool, token: str):
        """run: a name that no other run has; its keys are PREFIX/argosy/RUN/...

        Raises: UserError if the client is not installed, or the environment's settings are wrong.
        """
        self._clients = [_client(host, port, is_tls) for host, port in endpoints]
        self._names = [f"{host}:{port}" for host, port in endpoints]
        keys = f"{prefix}/argosy/{run}".lstrip("/")
        self._key, self._generation_key = f"{keys}/coordinator", f"{keys}/generation"
        self.token = token

    def holder(self) -> Holder | None:
        text, _ = self._read()
        return Holder.parse(text) if text else None

    def acquire(self, me: Holder) -> bool:
        text, revision = self._read()
        if text and Holder.parse(text).owner != me.owner:
            return False
        lease = self._ask(lambda client: client.lease(math.ceil(TTL_S)).id)
        # The number makes the value this attempt's own: a repeated request whose first answer got lost finds itself.
        value = f"{me} {lease}"
        put = {"request_put": {"key": _coded(self._key), "value": _coded(value), "lease": lease}}
        self._transact(revision, put)
        found, revision = self._read_raw()
        if found != value:
            return False
        self.token = f"{lease} {revision}"
        return True

    def renew(self) -> None:
        lease, revision = self._held()
        path = "/lease/keepalive"
        left = self._ask(lambda client: client.post(client.get_url(path), json={"ID": lease})["result"].get("TTL", 0))
        if int(left) <= 0:
            raise LeaseLost("the lease has ended in etcd")
        if self._read()[1] != revision:
            raise LeaseLost("another coordinator has the lease in etcd")

    def check(self, generation: int) -> None:
        _, revision = self._held()
        put = {"request_put": {"key": _coded(self._generation_key), "value": _coded(f"{generation} {self.token}")}}
        if not self._transact(revision, put):
            raise LeaseLost("the lease has ended in etcd, or another coordinator has it")

    def release(self) -> None:
        _, revision = self._held()
        self._transact(revision, {"request_delete_range": {"key": _coded(self._key)}})

    def _held(self) -> tuple[int, int]:
        lease, revision = map(int, self.token.split())
        return lease, revision

    def _read(self) -> tuple[str, int]:
        """Return the holder as it was written, and the revision of that; "" and 0 if there is none."""
        value, revision = self._read_raw()
        return value.rpartition(" ")[0], revision

    def _read_raw(self) -> tuple[str, int]:
        found = self._ask(lambda client: client.get(self._key, metadata=True))
        return (found[0][0].decode(errors="replace"), int(found[0][1]["mod_revision"])) if found else ("", 0)

    def _transact(self, revision: int, action: dict[str, Any]) -> bool:
        """Do it if the holder's key was written last at `revision`; 0: if there is none. Return True if it was done."""
        is_unchanged = {"key": _coded(self._key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        request = {"compare": [is_unchanged], "success": [action], "failure": []}
        return bool(self._ask(lambda client: client.transaction(request).get("succeeded", False)))

    def _ask(self, question: Callable[[Any], T]) -> T:
        """Ask one of etcd's machines after the other, beginning with the one that answered last.

        All that is asked may be asked twice: transactions compare a revision. Raises: LeaseUnreachable.
        """
        from etcd3gw.exceptions import Etcd3Exception

        problems = []
        for _ in range(len(self._clients)):
            try:
                return _authenticated(self._clients[0], question)
            except (Etcd3Exception, OSError, ValueError, KeyError) as problem:  # requests raises OSErrors
                text = getattr(problem, "detail_text", "") or str(problem)
                problems.append(f"{self._names[0]}: {text.strip()[:200]}")
            self._clients.append(self._clients.pop(0))
            self._names.append(self._names.pop(0))
        raise LeaseUnreachable("etcd does not answer as it should: " + "; ".join(problems))


def _client(host: str, port: int, is_tls: bool) -> Any:
    try:
        from etcd3gw.client import Etcd3Client
    except ImportError:
        raise missing_extra("etcd3gw", "etcd", "launch.lease = etcd://...") from None
    certificate, key = os.environ.get(CERTIFICATE_VARIABLE), os.environ.get(KEY_VARIABLE)
    if bool(certificate) != bool(key):
        raise UserError(f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} belong together; set both, or none")
    client = Etcd3Client(
        host,
        port,
        protocol="https" if is_tls else "http",
        ca_cert=os.environ.get(CA_VARIABLE) if is_tls else None,
        cert_cert=certificate if is_tls else None,
        cert_key=key if is_tls else None,
        timeout=ETCD_TIMEOUT_S,
        api_path="/v3/",
    )
    client.session.trust_env = False  # no proxy, and no password from ~/.netrc
    return client


def _authenticated(client: Any, question: Callable[[Any], T]) -> T:
    """Ask with a token of etcd's if the environment names a user; get a new one when it has expired."""
    from etcd3gw.exceptions import Etcd3Exception

    if not os.environ.get(USER):
        return question(client)
    if "Authorization" in client.session.headers:
        try:
            return question(client)
        except Etcd3Exception as problem:
            if "invalid auth token" not in (problem.detail_text or ""):
                raise
            del client.session.headers["Authorization"]
    name, _, password = os.environ[USER].partition(":")
    login = {"name": name, "password": os.environ.get(PASSWORD, password)}
    client.session.headers["Authorization"] = client.post(client.get_url("/auth/authenticate"), json=login)["token"]
    return question(client)


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
