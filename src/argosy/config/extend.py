"""The run file's table `extend`: code of the user's own that a run uses (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import WithJsonSchema, model_validator

from argosy.config.section import Mark, Section
from argosy.extend.declared import CodeFile, Declaration, read_code, read_package
from argosy.extend.register import Kind


def one_of_or_declared(*names: str) -> WithJsonSchema:
    """Return the JSON schema of a key that takes one of `names`, or a name that the table `extend` brings."""
    return WithJsonSchema({"anyOf": [{"enum": list(names)}, {"type": "string"}]})


class ExtendConfig(Section):
    """Code of your own: callbacks, metrics and more. It is run with your rights, in the run's processes."""

    files: tuple[Path, ...] = ()
    """Python files that declare extensions; each is copied into the run's folder."""
    packages: tuple[str, ...] = ()
    """Extensions of installed packages, by the names of their entry points in the group argosy.extensions."""
    sha256: Annotated[dict[str, str], Mark.NO_OPTION] = {}
    """File or entry point -> checksum, which is filled in; one that is given must be right."""

    @cached_property
    def code(self) -> tuple[CodeFile, ...]:
        """The files, as they were when this was first asked; nothing of them is run."""
        return (*(read_code(path) for path in self.files), *(read_package(name) for name in self.packages))

    @property
    def checksums(self) -> dict[str, str]:
        """The checksum of each file and entry point."""
        return {file.name: file.sha256 for file in self.code}

    def check_name(self, key: str, name: str, kind: Kind, built_in: Collection[str]) -> None:
        """Raise ValueError unless `name`, the value of `key`, is built in or declared."""
        own = sorted(self.declared(kind))
        if twice := set(own) & set(built_in):
            name = min(twice)
            raise ValueError(
                f"extend.files = {self.declared(kind)[name].place}: there is a built-in {kind} {name}; rename yours"
            )
        if name in (*built_in, *own):
            return
        near = get_close_matches(name.lower(), [*built_in, *own], n=1)
        declared = (
            f"those that extend declares: {', '.join(own)}" if own else "one that a file in extend.files declares"
        )
        raise ValueError(
            f'{key} = "{name}": must be one of {", ".join(built_in)}, or {declared}'
            + (f".\n  Try {near[0]}" if near else "")
        )

    def declared(self, kind: Kind) -> dict[str, Declaration]:
        """Return what is declared of one kind, by name."""
        return {d.name: d for file in self.code for d in file.declarations if d.kind == kind}

    @model_validator(mode="after")
    def _is_good(self) -> Self:
        for key, items in (("files", self.files), ("packages", self.packages)):
            try:
                for item in items:
                    read_code(item) if isinstance(item, Path) else read_package(item)
            except ValueError as problem:
                raise ValueError(f"{key} = {problem}") from None
        seen: dict[tuple[str, ...], str] = {}
        for file in self.code:
            if ("", file.name) in seen:
                raise ValueError(f"files names two of the name {file.name}; rename one")
            seen["", file.name] = file.name
            for declaration in file.declarations:
                if declaration.key in seen:
                    raise ValueError(
                        f"files = {declaration.place}: the {declaration} is declared already, at "
                        f"{seen[declaration.key]}; give one of them another name"
                    )
                seen[declaration.key] = declaration.place
        return self

    @model_validator(mode="after")
    def _is_unchanged(self) -> Self:
        for file in self.code:
            if self.sha256.get(file.name, file.sha256) != file.sha256:
                raise ValueError(
                    f"sha256 = {self.sha256[file.name][:12]}... of {file.name}, and {file.path} has "
                    f"{file.sha256[:12]}...: it was changed. Restore it; or give your own file with --extend.files, "
                    "without the checksum, and --accept-changes"
                )
        return self
