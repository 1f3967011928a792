"""The page of `import argosy`: what each public name is, from its docstring."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import argosy
from argosy.config.section import texts_under_names
from reference.markdown import escaped, keys_table


def page() -> str:
    """Return the page of `import argosy`: what each public name is, from its docstring."""
    parts = [
        "# Python API",
        "The names of `import argosy`. [Argosy from Python](python.md) shows them at work.",
        *(_public(name, home, name) for name, home in sorted(argosy._HOME.items(), key=_functions_first)),
    ]
    extensions = sorted(_imported(f"argosy.{argosy.EXTEND}").items(), key=_functions_first)
    parts += [_public(name, home, f"{argosy.EXTEND}.{name}") for name, home in extensions]
    return "\n\n".join(parts)


def _functions_first(name_and_home: tuple[str, str]) -> tuple[bool, str]:
    return name_and_home[0][0].isupper(), name_and_home[0]


def _source(module: str) -> list[ast.stmt]:
    """Return the statements of a module, which is not imported."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text()).body


def _imported(package: str) -> dict[str, str]:
    """Return name -> module of the names that the package takes from its modules to be used by others."""
    froms = [node for node in _source(package) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in froms for alias in node.names}


def _public(name: str, home: str, shown: str) -> str:
    """Return the section of one public name that the module `home` defines."""
    parts = [f"## {shown} {{#{shown}}}"]
    for node, following in pairwise([*_source(home), ast.Pass()]):
        match node:
            case ast.FunctionDef(name=found) if found == name:
                parts += [f"```python\n{_signature(node)}\n```", _docstring(node)]
            case ast.ClassDef(name=found) if found == name:
                parts += [_docstring(node), *_members(name, node, home)]
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                parts.append(f"```python\n{ast.unparse(node)}\n```")
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    parts.append(escaped(str(following.value.value)))
    return "\n\n".join(parts)


def _signature(node: ast.FunctionDef) -> str:
    """Return `name(arguments) -> result`, an argument a line where they are many."""
    whole = f"{node.name}({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    if len(whole) <= 80:
        return whole
    # A comma parts arguments only outside of brackets.
    arguments = re.split(r", (?![^\[\](){}]*[\])}])", ast.unparse(node.args))
    return f"{node.name}(\n    " + ",\n    ".join(arguments) + ",\n)" + whole[whole.rfind(") ->") + 1 :]


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the docstring as Markdown: `name: meaning` becomes an entry of a list."""
    blocks = (ast.get_docstring(node) or "").replace("Args:\n", "").split("\n\n")
    # A line that ends in a full stop ends an entry, unless the next one is set in further.
    texts = [text for block in blocks for text in re.split(r"(?<=\.)\n(?! {5})", block)]
    parts: list[str] = []
    for text in (" ".join(text.split()) for text in texts):
        entries = re.split(r"(?:^|(?<=\. ))(?=(?:[a-z_]+|Raises): )", text)
        for entry in filter(None, map(str.strip, entries)):
            word = re.match(r"([a-z_]+): (.*)", entry)
            parts.append(f"- `{word[1]}`: {escaped(word[2])}" if word else escaped(entry))
    return "\n\n".join(parts)


def _members(name: str, node: ast.ClassDef, home: str) -> Iterator[str]:
    """Yield what a class of data has: its fields, or where these are documented."""
    if name in ("RunConfig", "PrepareConfig"):
        anchor = "" if name == "RunConfig" else "#data.prepare"
        yield f"Its fields are the keys of the [run file](run-file.md{anchor})."
        return
    if name == "Plan":
        yield "Its fields are the words of a [plan](run-file.md#plan)."
    else:
        said = texts_under_names(getattr(importlib.import_module(home), name))
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        rows = [
            f"| `{ast.unparse(f.target)}` | `{ast.unparse(f.annotation)}` | "
            f"{escaped(said.get(ast.unparse(f.target), ''))} |"
            for f in fields
        ]
        if rows:
            yield keys_table(["| field | type | meaning |", "|---|---|---|", *rows])
    yield keys_table(["| attribute, method | meaning |", "|---|---|", *map(_member, _public_methods(node))])


def _public_methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"))


def _member(method: ast.FunctionDef) -> str:
    """Return a property or a method as a row of a table."""
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(method.args))
    is_property = any(ast.unparse(mark) == "property" for mark in method.decorator_list)
    shown = method.name if is_property else f"{method.name}({arguments})"
    return f"| `{shown}` | {escaped(ast.get_docstring(method) or '')} |"
