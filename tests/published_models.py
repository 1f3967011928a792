"""Objects of Kubernetes against the published models: kubeflow-trainer-api's, which are made from the OpenAPI of JobSet
and Kubernetes, and those of the client."""

from __future__ import annotations

from typing import Any

MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "Secret": "IoK8sApiCoreV1Secret",
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "ServiceAccount": "IoK8sApiCoreV1ServiceAccount",
}


def check(found: dict[str, Any]) -> None:
    """Assert that an object is valid, and that no key of it is unknown."""
    from kubeflow_trainer_api import models

    kind = found["kind"]
    if kind in MODELS:
        model = getattr(models, MODELS[kind])
        read = model.from_dict(found).to_dict()
        assert (problem := lost(found, read)) == "", problem
    else:
        check_with_client(found)


def check_with_client(found: dict[str, Any]) -> None:
    """Roles and their bindings, which Kubeflow has no models of."""
    import json

    from kubernetes.client import ApiClient

    client = ApiClient()
    read = client.deserialize(json.dumps(found), f"V1{found['kind']}", "application/json")
    assert (problem := lost(found, client.sanitize_for_serialization(read))) == "", problem


def lost(sent: Any, read: Any, at: str = "") -> str:
    """Return where something that was sent is not in what was read; empty if all is."""
    if isinstance(sent, dict):
        missing = [key for key in sent if key not in read and sent[key] not in ({}, [], None)]
        if missing:
            return f"{at}: unknown {', '.join(missing)}"
        return next((p for key in sent if key in read and (p := lost(sent[key], read[key], f"{at}.{key}"))), "")
    if isinstance(sent, list | tuple):
        if len(sent) != len(read):
            return f"{at}: {len(sent)} became {len(read)}"
        return next((p for i, (a, b) in enumerate(zip(sent, read, strict=True)) if (p := lost(a, b, f"{at}[{i}]"))), "")
    return "" if str(sent) == str(read) else f"{at}: {sent!r} became {read!r}"
