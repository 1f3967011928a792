"""Sources of the user's: documents out of a function, in `prepare.input` as source:NAME or source:NAME:ARGUMENT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from argosy.config.layers import near_names
from argosy.errors import UserError
from argosy.extend.declared import CodeFile
from argosy.extend.loading import Extension, find, where

OWN = "source:"
TRIED = 8
"""Documents that are read twice before anything is written, to see that they come again."""


def texts_of(item: str, code: Sequence[CodeFile]) -> tuple[Callable[[], Iterable[str]], str]:
    """Return what gives the documents of `item`, and the checksum of the code that does.

    Raises: UserError if there is no such source, or it raises, yields other than text, or does not repeat itself.
    """
    name, _, argument = item.removeprefix(OWN).partition(":")
    declared = {d.name: file for file in code for d in file.declarations if d.kind == "source"}
    if name not in declared:
        near = near_names(name, sorted(declared)) if declared else "no file of extensions declares one (--extend FILE)."
        raise UserError(f"input = {item}: there is no source {name!r}; {near}")
    extension = find(code, "source", name)

    def texts() -> Iterator[str]:
        yield from _checked(extension, item, argument)

    first, second = list(islice(texts(), TRIED)), list(islice(texts(), TRIED))
    if first != second:
        raise UserError(
            f"{extension.declared.place}: the {extension.declared} yields other documents when it is read again. It is "
            "read several times, so it must repeat itself: sort what it lists, and seed what it draws."
        )
    return texts, declared[name].sha256_for("source", name)


def checksums_of(items: Iterable[str], code: Sequence[CodeFile]) -> dict[str, str]:
    """Return the checksum of the code of each source of the user's among `items`."""
    names = {item.removeprefix(OWN).partition(":")[0] for item in items if item.startswith(OWN)}
    return {
        d.name: file.sha256_for("source", d.name)
        for file in code
        for d in file.declarations
        if d.kind == "source" and d.name in names
    }


def _checked(extension: Extension, item: str, argument: str) -> Iterator[str]:
    declared = extension.declared
    number = 0
    try:
        for number, text in enumerate(extension.function(argument), 1):
            if not isinstance(text, str):
                raise TypeError(f"document {number} is a {type(text).__name__}, not text")
            yield text
    except Exception as error:
        place = where(error, declared.place.rpartition(":")[0])
        raise UserError(
            f"{place}: the {declared} raised {type(error).__name__}: {error}, after {number} documents of {item}."
        ) from error
