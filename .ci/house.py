"""Rules of the house that no linter knows: unique names, files of readable length, plain docstrings, clear commits.

python .ci/house.py    exits with 1 and a line for each rule that is broken
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE, TESTS = ROOT / "src" / "argosy", ROOT / "tests"
MOST_LINES = 450
SHARED_NAMES = {
    "Options": "each command's options are called so: it is what `cli` looks for",
    "T": "a type variable means nothing outside its functions",
    "M": "as T",
}
"""Names of classes and constants that may be defined more than once -> why."""
SINCE = "775ee0b"
"""The last commit from before subjects had a form."""
MOST_SUBJECT = 72
QUESTION = re.compile(r'"""(What|Which|How|Where|Whether|Whoever|Who|Whose|When)\b.*')
RAISED = re.compile(r"Raises: ((?:[A-Z]\w+(?:, | or |; |(?![\w])))+)")
"""The names that follow "Raises:" in a docstring, up to the first word that is none."""
NO_VERB = re.compile(r"(An?|The|This|What|Which|Who|Whose|Where|When|How|No|One|Two|Each|All|Some|Its?) |\w+ing\b")


def names_defined_twice() -> list[str]:
    """Return a line for each name of a class or constant that is defined twice, in two modules or in one."""
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            for name in defined(node):
                if name not in SHARED_NAMES:
                    places[name].append(str(path.relative_to(SOURCE)))
    return [f"{name} is defined in {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def defined(node: ast.stmt) -> Iterator[str]:
    """Yield the names of the class or the constants that a statement of a module defines."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for name in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(name, ast.Name) and name.id.lstrip("_").isupper():
                    yield name.id


def tests_of_one_name() -> list[str]:
    """Return a line for each module name that two folders of tests share where they are no packages.

    pytest imports such a module by its bare name, and refuses the second one of a process.
    """
    places = defaultdict(list)
    for path in sorted(TESTS.rglob("*.py")):
        if path.name != "conftest.py" and not (path.parent / "__init__.py").exists():
            places[path.name].append(str(path.relative_to(ROOT)))
    return [f"{' and '.join(where)}: pytest imports one of them" for where in places.values() if len(where) > 1]


def long_modules() -> list[str]:
    """Return a line for each module that is too long to be read at once."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        lines, name = path.read_text().count("\n"), str(path.relative_to(SOURCE))
        if lines > MOST_LINES:
            found.append(f"{name} has {lines} lines, more than {MOST_LINES}")
    return found


def questions() -> list[str]:
    """Return a line for each docstring that begins with a question word, not with its subject or an imperative."""
    return [
        f"{path.relative_to(SOURCE)}:{number}: begin with the subject or the verb: {match[0]}"
        for path in sorted(SOURCE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := QUESTION.search(line))
    ]


def lost_errors() -> list[str]:
    """Return a line for each error that a docstring says is raised, and that its module neither defines nor imports,
    nor any other module defines."""
    paths = sorted(SOURCE.rglob("*.py"))
    known = set(dir(builtins))
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                known |= {alias.asname or alias.name for alias in node.names}
    return [
        f"{path.relative_to(SOURCE)}: a docstring says that {name} is raised, and there is no such error"
        for path in paths
        for match in RAISED.finditer(path.read_text())
        for name in re.findall(r"[A-Z]\w+", match[1])
        if name not in known
    ]


def vague_subjects() -> list[str]:
    """Return a line for each commit whose subject is long, or does not say the change in the imperative."""
    known = subprocess.run(["git", "cat-file", "-e", SINCE], cwd=SOURCE, capture_output=True, check=False)
    if known.returncode:
        return []  # a shallow clone, or no repository
    log = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h %s", f"{SINCE}..HEAD"],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for line in log.stdout.splitlines():
        number, _, subject = line.partition(" ")
        if len(subject) > MOST_SUBJECT:
            found.append(f"commit {number}: {len(subject)} characters, more than {MOST_SUBJECT}: {subject}")
        elif not subject[:1].isupper() or NO_VERB.match(subject) or subject.endswith("."):
            found.append(f'commit {number}: say the change, as in "Check a job record": {subject}')
    return found


if __name__ == "__main__":
    problems = [
        *names_defined_twice(),
        *tests_of_one_name(),
        *long_modules(),
        *questions(),
        *lost_errors(),
        *vague_subjects(),
    ]
    print("\n".join(problems) or "The house keeps its rules: names, lengths, docstrings, errors, subjects.")
    sys.exit(bool(problems))
