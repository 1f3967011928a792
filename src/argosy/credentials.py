"""Credentials in URLs: they are found here, hidden in every message, and refused in a run file.

A run file is kept in the run's folder and run again, so what it holds is not secret; fsspec's file systems take
credentials from the environment or from files of their own.
"""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
CREDENTIALS_PROBLEM = "it holds credentials, which would be written to run.toml. Leave them out of the URL and give "
CREDENTIALS_OF_STORES = (
    "them by the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_SAS_TOKEN, ETCDCTL_USER and ETCDCTL_PASSWORD, ...) or in ~/.config/fsspec/conf.json; what a signed "
    "link leads to, download first"
)
CREDENTIALS_REMEDY = f"{CREDENTIALS_PROBLEM}{CREDENTIALS_OF_STORES}"

# One slash: of a URL that was taken for a path. A chained URL (zip://x::https://y) is several.
# It begins where no letter of a scheme is before it, so that a long text without URLs is looked at once.
_URL_WITH_USER = re.compile(r"""(?<![a-zA-Z0-9+.-])([a-zA-Z0-9+.-]+)(:/{1,2})((?:(?!::)[^\s'"<>])+)""")
_HOST = re.compile(r"(\[[^\]]*\]?|[^:]*)(:[0-9]*)?")
_QUERY = re.compile(r"([?&;#])([^=?&;#]+)=([^&;#]+)")
_SECRET_NAME = re.compile(
    r"signature|token|secret|passw|credential|api[-_]?key|(access|account|shared)[-_]?key|authorization"
    r"|^(sig|pwd|pass|auth|sas|key)$",
    re.IGNORECASE,
)
_NO_SECRETS = ("github", "git")
"""Schemes in which a colon before the @ means something else: github://owner:repository@branch/path."""
_NOT_FIRST = "0123456789+.-"
"""Characters that no scheme begins with; a list in YAML or a number may stand before it."""
_ALL_SECRETS = ("http", "https")
"""Schemes in which whatever stands before the @ may be a token."""


def redact(text: str) -> str:
    """Return `text` with *** in place of the credentials of all URLs in it: user and password, signatures, tokens."""
    return _URL_WITH_USER.sub(_redacted, text) if ":/" in text else text


def has_credentials(text: str) -> bool:
    """True if there is a URL with credentials in `text`."""
    return redact(text) != text


def redacted(value: Any) -> Any:
    """Return a record with all its texts redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redacted(key): redacted(inner) for key, inner in value.items()}
    return [redacted(inner) for inner in value] if isinstance(value, list | tuple) else value


def _redacted(url: re.Match[str]) -> str:
    scheme, slashes, rest = url.groups()
    return f"{scheme}{slashes}{_QUERY.sub(_without_value, _without_user(scheme.lower().lstrip(_NOT_FIRST), rest))}"


def _without_user(scheme: str, rest: str) -> str:
    first = re.split("[/?#]", rest, maxsplit=1)[0]
    user, at, _ = first.rpartition("@")
    if at and scheme not in _NO_SECRETS and (":" in user or scheme in _ALL_SECRETS):
        return MASK + rest[len(user) :]
    if not at and "@" in rest and not _HOST.fullmatch(first):  # no port: a password with a slash in it, as AWS makes
        return MASK + rest[rest.rindex("@") :]
    return rest


def _without_value(entry: re.Match[str]) -> str:
    mark, name, value = entry.groups()
    return f"{mark}{name}={MASK if _SECRET_NAME.search(name) else value}"
