"""The lease in Kubernetes: an object of its own kind for this, Lease of coordination.k8s.io/v1.

Whoever changes the object names the version that it has seen, and the API server refuses it if there is a newer one.
It was tested against a server that implements this part of the API, on no cluster yet.
"""

from __future__ import annotations

import datetime
import math
import os
from http import HTTPStatus
from typing import Any

from argosy.errors import UserError, missing_extra
from argosy.supervise.lease.lease import TTL_S, Holder, LeaseLost, LeaseUnreachable, ObservedHolder

KUBERNETES_TIMEOUT_S = 2.0
CONFLICT_TRIES = 3
"""Changes of the object that another change was faster than: somebody may edit its labels."""
RUN_ANNOTATION, ADDRESS_ANNOTATION, GENERATION_ANNOTATION = "argosy/run", "argosy/address", "argosy/generation"
"""Annotations of the object."""

Object = dict[str, Any]


class KubernetesLease:
    """A `Lease` in Kubernetes; its token is the holder's name and the number of holders so far."""

    def __init__(self, namespace: str, name: str, run: str, token: str):
        """run: a name that no other run has. Raises: UserError if the client is not installed or not configured."""
        self._namespace, self._name, self._run, self.token = namespace, name, run, token
        self._api = _api()
        self._watched = ObservedHolder()

    def holder(self) -> Holder | None:
        """Return the coordinator that holds the lease; None if it is free, or was not renewed in `TTL_S` of looking.

        Raises: UserError if it is another run's.
        """
        lease = self._read()
        return None if lease is None or self._is_free(lease) else self._holder_of(lease)

    def acquire(self, me: Holder) -> bool:
        lease = self._read()
        if lease is not None and not self._is_free(lease) and self._holder_of(lease).owner != me.owner:
            return False
        is_new = lease is None
        lease = lease or {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
        spec, now = lease.setdefault("spec", {}), _now()
        number = int(spec.get("leaseTransitions") or 0) + 1
        spec.update(
            holderIdentity=me.owner,
            leaseDurationSeconds=math.ceil(TTL_S),
            acquireTime=now,
            renewTime=now,
            leaseTransitions=number,
        )
        lease["metadata"].setdefault("annotations", {}).update(
            {RUN_ANNOTATION: self._run, ADDRESS_ANNOTATION: f"{me.host} {me.port}"}
        )
        if not (self._create(lease) if is_new else self._replace(lease)):
            return False
        self.token = f"{me.owner} {number}"
        return True

    def renew(self) -> None:
        self._change({}, renewTime=_now())

    def check(self, generation: int) -> None:
        self._change({GENERATION_ANNOTATION: str(generation)})

    def release(self) -> None:
        self._change({}, holderIdentity="", renewTime=_now())

    def _change(self, annotations: dict[str, str], **values: Any) -> None:
        """Change the object, if its holder is this process. Raises: LeaseLost."""
        for _ in range(CONFLICT_TRIES):
            lease = self._read()
            if lease is None or _token_of(lease) != self.token:
                raise LeaseLost(f"another coordinator has the lease {self._namespace}/{self._name}")
            lease["spec"].update(values)
            lease["metadata"].setdefault("annotations", {}).update(annotations)
            if self._replace(lease):
                return
        raise LeaseUnreachable(f"the lease {self._namespace}/{self._name} is changed all the time by something else")

    def _is_free(self, lease: Object) -> bool:
        return not lease["spec"].get("holderIdentity") or self._watched.has_ended(
            (_token_of(lease), lease["spec"].get("renewTime"))
        )

    def _holder_of(self, lease: Object) -> Holder:
        annotations = lease["metadata"].get("annotations") or {}
        if annotations.get(RUN_ANNOTATION) != self._run:
            raise UserError(
                f"launch.lease = kubernetes://{self._namespace}/{self._name} is held by another run, or by another "
                "program. Give this run a lease of its own, for example with the run's name in it."
            )
        return Holder.parse(f"{lease['spec']['holderIdentity']} {annotations.get(ADDRESS_ANNOTATION, '')}")

    # ---- the API -------------------------------------------------------------------------------------------------

    def _read(self) -> Object | None:
        found: Object | None = self._call("read_namespaced_lease", self._name, self._namespace)
        if found is not None:
            found.setdefault("spec", {})  # somebody has created it by hand, for its rights or labels
        return found

    def _create(self, lease: Object) -> bool:
        return self._call("create_namespaced_lease", self._namespace, lease) is not None

    def _replace(self, lease: Object) -> bool:
        return self._call("replace_namespaced_lease", self._name, self._namespace, lease) is not None

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return an object as JSON has it; None if there is none, or if there is another version of it."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            answer = getattr(self._api, method)(*arguments, _request_timeout=KUBERNETES_TIMEOUT_S)
        except ApiException as problem:
            if problem.status == HTTPStatus.CONFLICT or (
                problem.status == HTTPStatus.NOT_FOUND and not method.startswith("create")
            ):
                return None
            remedy = ""
            if problem.status == HTTPStatus.FORBIDDEN:
                remedy = " (its service account needs get, create and update of leases in coordination.k8s.io)"
            raise LeaseUnreachable(f"Kubernetes: {problem.status} {problem.reason}{remedy}") from None
        except (HTTPError, OSError, ValueError) as problem:
            raise LeaseUnreachable(f"Kubernetes does not answer: {problem}") from None
        return self._api.api_client.sanitize_for_serialization(answer)


def _api() -> Any:
    try:
        from kubernetes import client, config
        from kubernetes.config import ConfigException
    except ImportError:
        raise missing_extra("kubernetes", "kubernetes", "launch.lease = kubernetes://...") from None
    configuration = client.Configuration()
    configuration.retries = False  # the next renewal is one
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            # The client itself reads the variable once, when it is imported.
            config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=configuration)
    except ConfigException as problem:
        raise UserError(
            f"launch.lease = kubernetes://...: no way to the API server is configured ({problem}). Run in a pod with a "
            "service account, or set KUBECONFIG to a file that kubectl works with."
        ) from None
    return client.CoordinationV1Api(client.ApiClient(configuration))


def _token_of(lease: Object) -> str:
    return f"{lease['spec'].get('holderIdentity')} {lease['spec'].get('leaseTransitions')}"


def _now() -> str:
    """Return the time as Kubernetes' MicroTime wants it, always with six digits of microseconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
