"""A folder that anybody may have written to: whatever one run's files hold, it and all others are answered."""

from __future__ import annotations

import copy
import json
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from argosy.errors import UserError
from argosy.watch.library import condition_of, ordered, table_of_steps
from argosy.watch.overview import RUN_ROW_KEYS, line
from argosy.watch.reader import RunReader
from run_folder import RunFolder

pytest.importorskip("starlette")

from starlette.datastructures import QueryParams
from starlette.requests import Request

from argosy.launch.launched import launched_in
from argosy.observe.panel import one_line, panel
from argosy.watch import overview, server
from argosy.watch.library import Library, OpenRun, Unreadable
from argosy.watch.prometheus import exposition
from argosy.watch.terminal import FolderView, seen
from run_folders import Made, Trouble, append
from watch.served import served

GONE = object()
WRONG = [
    None, True, -1, 0.5, "<b>", "\ud800", [], {}, [["x"]], {"a": {"b": "c"}}, -(2**70), 10**400, [10**400],
    1e308, float("nan"), float("inf"), GONE,
]  # fmt: skip
WRONG_TOML = ["-1", f"1{'0' * 400}", "1e308", "nan", "-inf", '"<b>"', '"\\u0000"', "[]", "{}", "[nan, inf, -1.0]",
              '[["x"]]', "true", "0.5", "1979-05-27"]  # fmt: skip
LINES = [b'{"a": 1', b"\xff\xfe\n", b"null\n", b"[1]\n", b'{"step": ' + b"[" * 5000 + b"\n", b"\0" * 100 + b"\n"]
SMALL = Made(
    steps=40, experts=2, user=("accuracy",), save_every=20, evaluate_every=20, norms_every=20,
    trouble=Trouble(killed=(1, 20), straggler=(2, 5)),
)  # fmt: skip
QUERIES = [
    ("ranks", {"key": "seconds.forward", "from": "1", "to": "3"}),
    ("ranks", {"key": "communication.dp_replicate.network.seconds"}),
    ("series", {"keys": "loss,seconds.forward,norms.layers.0.weight,time_s"}),
    *((view, {}) for view in server.VIEWS),
]


def folders(root: Path) -> Iterator[Path]:
    """A run that trains now, and one that has ended, with all files that runs have."""
    now = replace(SMALL, total_steps=100, start_s=time.time() - 40, is_finished=False)
    for made, name in ((now, "now"), (SMALL, "ended")):
        folder = made.write(root / name / "run")
        membership = {"generation": 2, "size": 4, "plan": "", "ranks": {"node-0/0": 0}, "time_s": 1.0}
        (folder / "membership.json").write_text(json.dumps(membership))
        append(folder / "ledger.jsonl", {"round": 1, "participants": ["a", "b"], "chain": "ab", "samples": [0, 32]})
        append(folder / "profiles" / "step-1" / "summary.json", {"steps": [1, 2], "ranks": {"0": {"operations": []}}})
        yield folder


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values in a table; of a list, the first two."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*at, key))


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """The value with `new` at this path."""
    if not at:
        return None if new is GONE else new
    copied = inner = copy.deepcopy(value)
    for key in at[:-1]:
        inner = inner[key]
    if new is GONE:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return copied


def damages(folder: Path, random: random.Random) -> Iterator[tuple[Path, str, bytes]]:
    """Each file with a wrong value at one place, for each place of each kind of line: what it is, and the bytes."""
    for path in sorted(path for path in folder.rglob("*.*") if path.suffix in (".json", ".jsonl", ".toml")):
        lines = path.read_bytes().splitlines(keepends=True)
        name = str(path.relative_to(folder))
        if path.suffix == ".toml":
            for n, line in enumerate(lines):
                if b"=" in line:
                    new = random.choice(WRONG_TOML)
                    text = b"".join([*lines[:n], line.split(b"=")[0] + f"= {new}\n".encode(), *lines[n + 1 :]])
                    yield path, f"{name}: {line!r} {new[:20]}", text
        elif path.suffix == ".json":
            table = json.loads(b"".join(lines))
            for at in places(table):
                new = random.choice(WRONG)
                yield path, f"{name}: {at} {str(new)[:20]!r}", json.dumps(changed(table, at, new)).encode()
        else:
            kinds = {
                (line.get("event"), *sorted(line)[:1], "norms" in line): n
                for n, line in enumerate(map(json.loads, lines))
            }
            for n in kinds.values():
                for at in places(json.loads(lines[n])):
                    new = random.choice(WRONG)
                    line = json.dumps(changed(json.loads(lines[n]), at, new)).encode() + b"\n"
                    yield (
                        path,
                        f"{name}: line {n} {at} {str(new)[:20]!r}",
                        b"".join([*lines[:n], line, *lines[n + 1 :]]),
                    )
            for line in LINES:
                yield path, f"{name}: {line[:20]!r}", b"".join([*lines, line])


def read_all(folder: Path) -> None:
    """Ask all that there is to ask of a run; nothing may be raised, and nothing be unreadable."""

    def fail(run_id: str, why: str) -> Any:
        raise AssertionError(why)

    library = Library(folder.parent)
    library.ask_all(lambda run_id, tail: server.encoded(overview.line(run_id, tail)), fail)
    exposition(library.ask_all(server.latest, fail)).encode()
    assert library.news({})[0]["state"] != "unreadable"
    library.ask("run", lambda entry: server.encoded(overview.details("run", entry.reader)))
    for view, query in QUERIES:
        asked = server.QueryParameters(Request({"type": "http", "query_string": str(QueryParams(query)).encode()}))
        library.ask("run", lambda entry, view=view, asked=asked: server.encoded(server.VIEWS[view](asked, entry)))
    look = seen(FolderView(folder))
    one_line(look).plain.encode()
    assert panel(look, 100, 30)
    for run in launched_in(folder.parent):
        f"{run.state} {run.why} {run.step}".encode()


def check(folder: Path, found: list[tuple[Path, str, bytes]]) -> None:
    """Damage the folder in each of these ways, one after the other, and read it."""
    problems = []
    for path, what, damaged in found:
        before = path.read_bytes()
        path.write_bytes(damaged)
        try:
            read_all(folder)
        except Exception as problem:
            problems.append(f"{what}: {problem!r} {problem.__cause__!r}")
        path.write_bytes(before)
    assert not problems, "\n".join(problems)


def test_a_wrong_value_anywhere_in_a_run_keeps_nothing_from_being_shown(tmp_path: Path) -> None:
    for folder in folders(tmp_path):
        check(folder, random.Random(7).sample(list(damages(folder, random.Random(7))), 10))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_wrong_value_in_any_place_of_a_run_keeps_nothing_from_being_shown(tmp_path: Path, seed: int) -> None:
    for folder in folders(tmp_path):
        check(folder, list(damages(folder, random.Random(seed))))


@pytest.mark.parametrize("name", ["metrics.jsonl", "events/rank-0.jsonl", "nodes/node-0.jsonl", "samples.jsonl"])
def test_a_line_of_ten_megabytes_is_passed_over(tmp_path: Path, name: str) -> None:
    folder = SMALL.write(tmp_path / "run")
    append(folder / name, {"time_s": 1.0, "event": "x" * 10 * 2**20, "text": 1})
    read_all(folder)


def test_a_run_whose_numbers_fill_the_memory_gives_back_what_it_can_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.watch.library.MOST_HELD_BYTES", 0)
    RunFolder(tmp_path / "run").step(0, 1)
    library = Library(tmp_path)
    held = [library.ask("run", lambda entry: "seconds.forward" in entry.reader.steps) for _ in range(2)]
    assert held == [True, False]
    assert library.ask("run", lambda entry: entry.reader.steps["seconds.forward"].tolist()) == [0.2, 0.2]


def test_one_run_that_cannot_be_read_keeps_no_other_from_being_shown(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        Made(steps=5).write(tmp_path / name)
    library = Library(tmp_path)

    def broken(entry: OpenRun) -> Any:
        raise RuntimeError("a file that no check foresees")

    with pytest.raises(Unreadable, match="bad: it cannot be read"):
        library.ask("bad", broken)
    assert library.ask("bad", lambda entry: len(entry.reader.steps)) == 5, "it is read anew"

    def states(run_id: str, tail: Any) -> str:
        if run_id == "bad":
            raise RuntimeError("a file that no check foresees")
        return str(tail.state)

    for _ in range(2):
        found = library.ask_all(states, lambda run_id, why: why)
        assert found == ["it cannot be read (RuntimeError: a file that no check foresees)", "finished"]
    free = threading.Thread(target=library.ask_all, args=(lambda *_: None, lambda *_: None), daemon=True)
    free.start()
    free.join(20)
    assert not free.is_alive(), "no lock is left behind"


def test_a_text_where_a_time_belongs_stops_no_answer_of_the_server(tmp_path: Path) -> None:
    bad = Made(steps=20).write(tmp_path / "bad")
    Made(steps=20).write(tmp_path / "good")
    append(bad / "metrics.jsonl", {"step": 20, "loss": 1.0, "time_s": "<b>"})
    with served(tmp_path) as server_here:
        for path in ("/api/runs", "/metrics", "/api/runs/bad", "/api/runs/bad/series", "/api/runs"):
            assert server_here.get(path).status == 200
        runs = {run["id"]: run for run in server_here.get("/api/runs").json()}
        assert runs["bad"]["step"] == 21 and runs["good"]["state"] == "finished"


ROW = {"loss": 2.5, "validation_loss": 2.75, "tokens": 2e9, "state": "finished", "model": "llama3-8b", "mfu": None}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("loss < 3 and tokens > 1e9", True),
        ("loss < 2 or val < 3", True),
        ("not loss < 2", True),
        ("2 < loss < 2.6", True),
        ("val - loss > 0.3", False),
        ("-loss < -2.4 and tokens / 1e9 == 2", True),
        ('state == "finished" and "llama" in model', True),
        ('"qwen" not in model', True),
        ("mfu < 1", False),
        ("mfu >= 1", False),
        ("not mfu < 1", True),
        ("state < 3", False),
        ("loss / 0 > 1", False),
        ('model * 100000000000 == "" or "a" * 100000000000 == ""', False),  # texts are no numbers, and take no memory
    ],
)
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    assert condition_of(text, ROW)(ROW) is holds


def test_no_comparison_with_a_loss_that_is_not_finite_holds() -> None:
    row = ROW | {"loss": math.nan}
    assert not condition_of("loss < 3", ROW)(row) and not condition_of("loss >= 3", ROW)(row)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('id')", "model.upper() == 'X'", "loss[0] < 3", "(lambda: 1)()", "loss ** 9 < 3",
        "lss < 3", "loss <", "", "loss < 3; tokens > 1", "[x for x in model]", "loss < 3\x00", "1" * 2000,
        "not " * 200 + "loss",
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused_and_nothing_is_run(text: str) -> None:
    try:
        holds = condition_of(text, ROW)
    except UserError as problem:
        assert "--where" in str(problem)
    else:
        assert text.startswith("not ") and holds(ROW) in (True, False)


def test_runs_without_the_key_come_last_in_any_order() -> None:
    rows: list[dict[str, Any]] = [{"loss": 3.0}, {"loss": None}, {"loss": 1.0}]
    assert [row["loss"] for row in ordered(rows, "loss", ROW)] == [1.0, 3.0, None]
    assert [row["loss"] for row in ordered(rows, "-loss", ROW)] == [3.0, 1.0, None]
    with pytest.raises(UserError, match="did you mean loss"):
        ordered(rows, "los", ROW)


@pytest.fixture
def reader(tmp_path: Path) -> RunReader:
    run = RunFolder(tmp_path / "tiny")
    run.step(*range(10))
    run.step(10, loss=math.nan)
    run.evaluation(4, 3.5)
    run.evaluation(9, 3.25)
    return RunReader.read(run.path)


def test_the_keys_of_a_run_are_those_of_its_line(reader: RunReader) -> None:
    assert tuple(line("tiny", reader)) == RUN_ROW_KEYS


def test_steps_become_columns(reader: RunReader) -> None:
    assert table_of_steps(reader, ["step", "loss"], 2, 9, 3) == {"step": [2, 5, 8], "loss": [2.0, 5.0, 8.0]}
    assert table_of_steps(reader, ["loss", "val"], every=5) == {"loss": [4.0, 9.0], "validation_loss": [3.5, 3.25]}
    assert table_of_steps(reader, ["loss"], 9) == {"loss": [9.0, None]}
    assert table_of_steps(reader, ["step", "val"]) == {"step": [4, 9], "validation_loss": [3.5, 3.25]}
    both = table_of_steps(reader, ["loss", "val"], 3, 5)
    assert both == {"loss": [3.0, 4.0, 5.0], "validation_loss": [None, 3.5, None]}
    assert set(table_of_steps(reader, ["all"])) >= {"step", "loss", "validation_loss", "seconds.forward"}
    with pytest.raises(UserError, match="did you mean loss"):
        table_of_steps(reader, ["lss"])


def test_a_usual_column_is_empty_before_the_first_evaluation(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "young")
    run.step(0, 1)
    young = RunReader.read(run.path)
    assert table_of_steps(young, ["val"]) == {"validation_loss": []}
    assert table_of_steps(young, ["step", "loss", "val"])["validation_loss"] == [None, None]
    with pytest.raises(UserError, match="the run has no 'validation_los'"):
        table_of_steps(young, ["validation_los"])
