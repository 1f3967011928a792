"""The first of documents that are alike stays, whatever the number of workers, pieces and interruptions."""

from __future__ import annotations

import hashlib
import json
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.data import FiltersConfig, PrepareConfig
from argosy.data import filters, worker
from argosy.data import prepare as module
from argosy.data.crew import LEAST_AHEAD
from argosy.data.documents import InputPiece
from argosy.data.gopher import word_tokenizer
from argosy.data.manifest import TOKENIZER
from argosy.data.prepare import prepare
from argosy.data.shards import TokenSource
from argosy.data.tokenizer import Tokenizer
from argosy.data.work import Chunk, PrepareTask, WorkFolder, WorkState
from argosy.errors import UserError

pytest.importorskip("datatrove", reason="pip install 'argosy[filters]'")

WORDS = [f"{first}{second}" for first in ("wa", "ri", "mo", "ho") for second in ("ter", "ver", "use", "lk")]


def text(seed: int, changed: int = 0) -> str:
    """Sixty words; a changed one makes a document that is much alike."""
    words = random.Random(seed).choices(WORDS, k=60)
    words[30:30] = ["another"] * changed
    return " ".join(words)


DOCUMENTS = [text(seed) for seed in range(40)]
DOCUMENTS[20:20] = [text(3), text(4, 1), text(100)]
DOCUMENTS += [text(100, 1), text(3, 1), text(7)]
REPEATED = {20: "duplicate", 21: "near-duplicate", 43: "near-duplicate", 44: "near-duplicate", 45: "duplicate"}


@pytest.fixture
def config(tmp_path: Path, tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareConfig:
    monkeypatch.setattr(module, "DOCUMENTS_PIECE_BYTES", 3000)
    monkeypatch.setattr(module, "RESULT_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    return PrepareConfig(
        input=(str(tmp_path / "a.jsonl"),),
        out=tmp_path / "out",
        tokenizer=tokenizer_json,
        validation_fraction=0.0,
        shard_tokens=2000,
        processes=1,
        engine="huggingface",
        filters=FiltersConfig(duplicates="drop_near"),
    )


def changed(config: PrepareConfig, **options: Any) -> PrepareConfig:
    return config.model_copy(update=options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts(folder: Path) -> list[str]:
    tokenizer, source = Tokenizer.load(folder / TOKENIZER), TokenSource(folder, "train")
    ids, found = source.tokens(0, len(source)).tolist(), []
    while ids:
        end = ids.index(tokenizer.eod_id)
        found.append(tokenizer.decode(ids[:end]))
        ids = ids[end + 1 :]
    return found


def test_the_first_stays_and_what_was_left_out_is_counted(config: PrepareConfig) -> None:
    manifest = prepare(config)
    assert texts(config.out) == [document for number, document in enumerate(DOCUMENTS) if number not in REPEATED]
    assert manifest.dropped == {"duplicate": 2, "near-duplicate": 3}
    assert "5 documents dropped: 2 x duplicate, 3 x near-duplicate" in manifest.in_words()


def test_exact_ones_alone(config: PrepareConfig, tmp_path: Path) -> None:
    manifest = prepare(changed(config, filters=FiltersConfig(duplicates="drop_exact")))
    assert manifest.dropped == {"duplicate": 2} and len(texts(config.out)) == len(DOCUMENTS) - 2


def test_workers_pieces_and_parts_of_the_keys_make_no_difference(
    config: PrepareConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config)
    monkeypatch.setattr(filters, "SORTED_KEYS", 100)
    monkeypatch.setattr(module, "DOCUMENTS_PIECE_BYTES", 1700)
    prepare(changed(config, out=tmp_path / "three", processes=3))
    assert contents(config.out) == contents(tmp_path / "three")


def test_all_workers_make_tokens_after_the_search(config: PrepareConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = dict[str, int]()

    def say(folder: WorkFolder, state: WorkState) -> None:
        ahead[state.stage] = state.ahead
        told(folder, state)

    told = WorkFolder.say
    monkeypatch.setattr(WorkFolder, "say", say)
    prepare(config)
    assert ahead[worker.DUPLICATES_OUTPUT] == 1 and ahead[worker.TOKENS_OUTPUT] >= LEAST_AHEAD


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param(worker.KEYS_OUTPUT, marks=pytest.mark.slow),
        worker.DUPLICATES_OUTPUT,
        pytest.param(worker.TOKENS_OUTPUT, marks=pytest.mark.slow),
    ],
)
def test_interrupted_in_any_stage_it_goes_on(
    config: PrepareConfig, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config)
    interrupted = changed(config, out=tmp_path / "interrupted")
    with monkeypatch.context() as patch:
        results = module.Workers.results

        def stop(workers: Any, name: str, tasks: int, *where: Any, **more: Any) -> Any:
            for number, result in enumerate(results(workers, name, tasks, *where, **more)):
                if (name, number) == (stage, min(2, tasks - 1)):
                    raise KeyboardInterrupt
                yield result

        patch.setattr(module.Workers, "results", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(interrupted)
    prepare(interrupted)
    assert contents(config.out) == contents(tmp_path / "interrupted")


def test_other_filters_are_refused_both_ways(config: PrepareConfig) -> None:
    prepare(config)
    for changes in (FiltersConfig(), FiltersConfig(duplicates="drop_exact")):
        with pytest.raises(UserError, match=r"other options \(filters = {'duplicates': 'drop_near'} there"):
            prepare(changed(config, filters=changes))


def test_the_limit_counts_what_stays(config: PrepareConfig) -> None:
    kept = [document for number, document in enumerate(DOCUMENTS) if number not in REPEATED]
    limit = sum(len(document) for document in kept[:25]) + 10
    prepare(changed(config, max_text_bytes=limit))
    assert texts(config.out) == [*kept[:25], kept[25][:10]]


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True), max_size=12), st.integers(1, 5))
def test_repeated_is_what_a_loop_over_all_would_find(documents: list[list[int]], parts: int) -> None:
    spread = [[key * (2**64 // 31) for key in keys] for keys in documents]
    arrays = filters.as_arrays(list(enumerate(spread)))
    found = set()
    for part in range(parts):
        marked = filters.repeated([(0, filters.within(arrays, *filters.bounds(part, parts)))])
        found |= set(marked["numbers"].tolist())
    seen, expected = set[int](), set()
    for number, keys in enumerate(spread):
        expected |= {number} if seen & set(keys) else set()
        seen |= set(keys)
    assert found == expected


def test_keys_of_any_number_of_files_are_compared_with_few_open(tmp_path: Path) -> None:
    folder, files = WorkFolder(tmp_path / "work"), 200
    folder.make({"fingerprint": ""}, [], [])
    for piece in range(files):
        keys = Chunk({"marks": []}, filters.as_arrays([(0, [piece // 2])]), 1, True)
        folder.write(PrepareTask(worker.KEYS_OUTPUT, piece), 0, keys, "")
    stages = worker.Stages(None, folder, [], [InputPiece(n, n + 1) for n in range(files)])  # type: ignore[arg-type]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + files // 2, hard))
    try:
        [found] = stages.make(PrepareTask(worker.DUPLICATES_OUTPUT, 0), 1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.arrays["pieces"].tolist() == list(range(1, files, 2))


def test_a_long_document_has_the_same_signature_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    long = " ".join(random.Random(1).choices(WORDS, k=500))
    whole = filters.key_maker(FiltersConfig(duplicates="drop_near"))(long)
    monkeypatch.setattr(filters, "SHINGLES_AT_ONCE", 37)
    assert filters.key_maker(FiltersConfig(duplicates="drop_near"))(long) == whole and len(whole) == 15


@pytest.fixture(scope="module")
def datatroves_step() -> Any:
    from datatrove.pipeline.dedup import minhash
    from datatrove.utils.hashing import HashConfig

    settings = minhash.MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    return minhash.MinhashDedupSignature("memory://argosy", settings, language=word_tokenizer())


KEYS_OF = filters.key_maker(FiltersConfig(duplicates="drop_near"))
PIECES = ["A cafe\u0301", "naïve", "x_1.5,2", "３４", "日本สวัสดี", "🙂ok", "a\u2000b", " \u0301 ", "It’s\x1f", "İ"]


def digest(kind: bytes, data: bytes) -> int:
    """A key of eight bytes, by the kind of what is compared."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "little")


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(), st.text(st.characters(max_codepoint=127)))).map(" ".join))
def test_keys_are_those_of_datatrove(datatroves_step: Any, text: str) -> None:
    shingles = datatroves_step.get_shingles(text)
    buckets = datatroves_step.get_signature(shingles) if len(shingles) else []
    assert KEYS_OF(text)[1:] == [digest(b"bucket%d" % n, np.array(b, "<u8").tobytes()) for n, b in enumerate(buckets)]


def test_hashes_are_those_of_datatrove(datatroves_step: Any) -> None:
    step = datatroves_step
    values = np.random.default_rng(0).integers(0, 2**64, 1500, np.uint64)
    values[:5] = 0, 1, 2**61 - 2, 2**61 - 1, 2**64 - 1
    for shingles in (values[:, None], *values[:5, None, None]):
        found = filters.least_hashes(shingles, *step.parameters)
        assert found.tolist() == np.concatenate(step.get_signature(shingles)).tolist()
    plain = np.array([[1]], np.uint64), np.array([[0]], np.uint64)  # the hash is the remainder itself
    for value in values[:200]:
        assert int(filters.least_hashes(value.reshape(1, 1), *plain)[0]) == int(value) % (2**61 - 1)
