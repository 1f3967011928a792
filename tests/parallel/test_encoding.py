"""What ranks tell each other comes out as it went in, and nothing else comes out."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import argosy
from argosy import errors
from argosy.checkpoint.boxes import Box, Misfit
from argosy.checkpoint.fence import Fenced
from argosy.checkpoint.history import History, Position
from argosy.checkpoint.store import Checkpoint
from argosy.config.schema import RunConfig
from argosy.errors import ArgosyError, Interrupted, StorageError, UserError
from argosy.parallel import encoding
from argosy.parallel.encoding import ErrorRecord, FailedElsewhere, WrongMessage, decode, encode
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.bad_steps import BadStep, BadStepCounts
from argosy.training.loop import train
from argosy.training.recovery import SurvivorFacts
from argosy.training.state import StepUpdate
from argosy.training.stop import StopSignal
from tiny import eager, run_config

NUMBERS = st.integers(0, 2**63)
FLOATS = st.floats(allow_nan=False)
SHAPES = st.lists(NUMBERS, max_size=4).map(tuple)
BOXES = st.builds(Box, st.text(), st.sampled_from(["float32", "bool"]), SHAPES, SHAPES, SHAPES)
POSITIONS = st.builds(Position, NUMBERS, NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS)).map(tuple))
HISTORIES = st.builds(History, NUMBERS, st.lists(st.tuples(st.text(), NUMBERS)).map(tuple), st.text())
UPDATES = st.builds(StepUpdate, NUMBERS, FLOATS, FLOATS, FLOATS, FLOATS, NUMBERS, st.none())
BAD_STEPS = st.builds(BadStep, NUMBERS, st.just("not_finite"), FLOATS, FLOATS, FLOATS, FLOATS, NUMBERS)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    bool: st.booleans(),
    float: FLOATS,
    str: st.text(),
    str | None: st.none() | st.text(),
    list[tuple[tuple[int, tuple[str, ...]], int]]: st.lists(
        st.tuples(st.tuples(NUMBERS, st.lists(st.text()).map(tuple)), st.integers(0, 2**64))
    ),
    dict[str, int]: st.dictionaries(st.text(), st.integers()),
    list[Box]: st.lists(BOXES),
    Misfit | None: st.none() | st.builds(Misfit, BOXES, st.text()),
    SurvivorFacts: st.builds(SurvivorFacts, HISTORIES, POSITIONS, st.none() | UPDATES),
    BadStepCounts: st.builds(BadStepCounts, NUMBERS, NUMBERS, st.none() | BAD_STEPS, st.dictionaries(NUMBERS, NUMBERS)),
    tuple[Checkpoint, list[int]] | None: st.none()
    | st.tuples(st.builds(Checkpoint, st.just(Path("/runs/a/step-00000004"))), st.lists(NUMBERS)),
    ErrorRecord: st.builds(ErrorRecord, st.text(), st.text(), st.none() | NUMBERS),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
@settings(deadline=None)
@given(data=st.data())
def test_a_value_comes_out_as_it_went_in(kind: Any, data: st.DataObject) -> None:
    value = data.draw(VALUES[kind])
    assert decode(encode(value, kind), kind) == value


@pytest.mark.parametrize("number", [math.inf, -math.inf, 5e-324, -0.0, 0.1 + 0.2])
def test_floats_keep_their_bits(number):
    for kind, value in ((float, number), (list[dict[str, Any]], [{"loss": number}])):
        assert repr(decode(encode(value, kind), kind)) == repr(value)
    assert math.isnan(decode(encode(math.nan, float), float))


def test_a_run_and_its_plan_come_out_as_they_went_in():
    kind, value = tuple[RunConfig, Plan, int], (run_config(Path("corpus")), Plan.parse("tp=2,microbatch=4"), 3)
    assert decode(encode(value, kind), kind) == value


@settings(deadline=None)
@given(st.sampled_from(encoding.WIRE_DTYPES), st.lists(st.integers(0, 3), max_size=3))
def test_small_tensors_keep_their_bits(dtype, shape):
    loads = (torch.rand(shape) * 9).to(getattr(torch, dtype))
    update = StepUpdate(3, 1.0, 2.0, 0.0, 0.1, 256, loads)
    found: StepUpdate = decode(encode(update, StepUpdate), StepUpdate)
    assert found.loads is not None and found.loads.dtype == loads.dtype and torch.equal(found.loads, loads)


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_any_other_bytes_are_one_clear_error(data):
    with pytest.raises(WrongMessage, match=r"what rank 3 sent is not the .*int.* that is expected here"):
        decode(data, int, "rank 3")


@settings(deadline=None)
@given(st.data())
def test_a_message_that_was_changed_is_refused(data):
    message = bytearray(encode(["a", "b"], list[str]))
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WrongMessage):
        decode(message, list[str])


def test_a_value_of_another_type_neither_leaves_nor_enters():
    with pytest.raises(TypeError, match="cannot be sent as <class 'str'>"):
        encode(3, str)
    with pytest.raises(WrongMessage, match="not at the same place"):
        decode(encode(3, int), str)


def test_what_has_the_right_frame_and_the_wrong_content_is_refused():
    body = b'[{"step": 1, "tokens": "many"}]'
    _, kind, _, _ = encoding.FRAME_HEADER.unpack_from(encode(Position(1, 2), Position))
    message = encoding.FRAME_HEADER.pack(encoding.FRAME_MARK, kind, len(body), zlib.crc32(body)) + body
    with pytest.raises(WrongMessage, match="tokens"):
        decode(message, Position)


def test_a_tensor_of_which_nothing_was_sent_takes_no_memory():
    assert encoding.from_text('[["float32", [3, 0], ""]]', encoding.SentTensor).shape == (3, 0)
    with pytest.raises(WrongMessage, match="it is no tensor"):
        encoding.from_text('[["float32", [1000000000, 1000], ""]]', encoding.SentTensor)


class Unknown:
    """A class of which nothing is known could only be pickled."""


def test_a_class_that_only_a_pickle_could_carry_cannot_be_sent():
    with pytest.raises(TypeError, match="cannot be sent"):
        encode(Unknown(), Unknown)
    with pytest.raises(TypeError, match="cannot be sent"):
        encode({"a": Unknown()}, dict[str, Any])


def test_a_message_has_a_limit(monkeypatch):
    monkeypatch.setattr(encoding, "MOST_FRAME_BYTES", 100)
    with pytest.raises(TypeError, match="more than the 100 of a message"):
        encode("x" * 100, str)


@pytest.mark.parametrize("kind", [k for k in encoding.argosy_errors().values() if k is not Interrupted])
def test_errors_keep_class_words_and_exit_code(kind):
    found = ErrorRecord.of(kind("so it is")).error()
    assert (type(found), str(found), found.exit_code) == (kind, "so it is", kind.exit_code)


def test_errors_that_other_modules_have_keep_what_the_table_has():
    assert {UserError, StorageError, ArgosyError} < set(encoding.argosy_errors().values())
    assert encoding.argosy_errors().keys() <= vars(errors).keys()
    stopped = ErrorRecord.of(Interrupted("stopped", 15)).error()
    assert isinstance(stopped, Interrupted) and stopped.exit_code == 143
    assert type(ErrorRecord.of(Fenced("gone on")).error()) is ArgosyError
    other = ErrorRecord.of(KeyError("a")).error()
    assert type(other) is FailedElsewhere and str(other) == "KeyError: 'a'"
    assert type(ErrorRecord("system", "rm", 1).error()) is FailedElsewhere


# Nothing else


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
OBJECTS = ("_object", "_object_list", "object_enforce_type")
NO_OBJECTS = {"is_object", "py_object"}
"""A test of JSON, and what ctypes calls a reference."""
WRITES_THEM = {"training/services/profiling.py"}
"""Writes what torch's viewer of memory snapshots reads, and reads none."""
ONE_MACHINE = {"simulate/simulate.py"}
"""Uses a pool of its own child processes, over pipes that nobody else has."""


def test_no_module_pickles_or_uses_torch_s_collectives_of_objects():
    root, words = Path(argosy.__file__).parent, (*PICKLES, *OBJECTS, "multiprocessing", "torch.load", "torch.save")
    for path in root.rglob("*.py"):
        where, text = str(path.relative_to(root)), path.read_text()
        for node in ast.walk(ast.parse(text)) if any(word in text for word in words) else ():
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert where in WRITES_THEM or not {name.split(".")[0] for name in modules} & PICKLES, where
                assert where in ONE_MACHINE or "multiprocessing" not in modules, where
            names = [getattr(node, "attr", ""), getattr(node, "id", "")]
            assert not any(name.endswith(OBJECTS) and name not in NO_OBJECTS for name in names), f"{where}: {names}"
            is_io = isinstance(node, ast.Attribute) and node.attr in ("load", "save")
            if is_io and ast.unparse(node) in ("torch.load", "torch.save"):
                raise AssertionError(f"{where}: {ast.unparse(node)} pickles")


def train_without_pickles(world: World, plan: str, run: RunConfig, folder: Path) -> int:
    """Train with torch's own pickles made errors: its pipelines and meshes could use them as well."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("torch pickles something for another rank")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_object_to_tensor", "_tensor_to_object"):
            patch.setattr(torch.distributed.distributed_c10d, name, refuse)
        return train(run, eager(plan), world, folder, StopSignal())


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2,dp_shard=2,microbatch=1",
        pytest.param("pp=2", marks=pytest.mark.slow),
        pytest.param("tp=2,dp_shard=2", marks=pytest.mark.slow),
    ],
)
def test_no_training_run_pickles_anything_for_another_rank(workers, corpus, tmp_path, plan):
    run = run_config(corpus, evaluate={"every_steps": 2, "tokens": 600}, train={"steps": 3})
    assert all(workers.run(Plan.parse(plan).world_size, train_without_pickles, plan, run, tmp_path / "run"))


def test_a_pickle_of_torch_would_be_seen(workers):
    assert workers.run(2, pickling) == [True] * 2


def pickling(world: World) -> bool:
    seen = []
    real = torch.distributed.distributed_c10d._object_to_tensor

    def noted(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        seen.append(1)
        return real(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.distributed_c10d, "_object_to_tensor", noted)
        torch.distributed.all_gather_object([None] * world.size, 1)
    return bool(seen)


def test_what_a_process_of_another_node_has_encoded_is_understood():
    """Nothing is forked from the same process there, so no address in memory is the same."""
    program = (
        "import sys, torch; from argosy.parallel.encoding import SentTensor, encode; "
        "sys.stdout.buffer.write(encode([('a', torch.ones(2))], list[tuple[str, SentTensor]]))"
    )
    sent = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout
    ((name, tensor),) = decode(sent, list[tuple[str, encoding.SentTensor]], "rank 1")
    assert name == "a" and tensor.tolist() == [1.0, 1.0]
