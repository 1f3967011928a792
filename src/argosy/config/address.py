"""Addresses in the run file: HOST:PORT."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

PATTERN = r"[^\s:]+:\d{1,5}"
MOST_PORT = 65535


def host_and_port(text: str) -> tuple[str, int]:
    """Return both of an address HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def interface_of(host: str) -> str:
    """Return the address to listen at for peers that call `host`: 127.0.0.1 for this machine alone, "" for all."""
    return "127.0.0.1" if host in ("127.0.0.1", "localhost") else ""


def _checked(text: str) -> str:
    if not re.fullmatch(PATTERN, text) or not 0 < host_and_port(text)[1] <= MOST_PORT:
        raise ValueError(
            f'"{text}" is no address. Write HOST:PORT, with a port from 1 to {MOST_PORT}, such as '
            '"node1.example.org:7100"'
        )
    return text


def _checked_if_given(text: str) -> str:
    return text and _checked(text)


Address = Annotated[str, AfterValidator(_checked), Field(json_schema_extra={"pattern": f"^{PATTERN}$"})]
OptionalAddress = Annotated[
    str, AfterValidator(_checked_if_given), Field(json_schema_extra={"pattern": f"^$|^{PATTERN}$"})
]
"""An address, or an empty text."""
