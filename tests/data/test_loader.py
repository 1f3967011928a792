from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.config.data import DataConfig, DataStage, PrepareConfig
from argosy.config.train import BatchSizes
from argosy.data.chat_template import CHATML
from argosy.data.loader import OpenData, open_data
from argosy.data.manifest import TEMPLATE
from argosy.data.order import Order, Samples
from argosy.data.shards import BadShard
from argosy.data.tokenizer import train
from argosy.errors import DataError, UserError
from data.conftest import MakeFolder, damage, write_folder

SEQ_LEN, GLOBAL_BATCH = 8, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer_json: Path) -> tuple[Path, Path]:
    """Two sources whose tokens tell where they are from: a counts 0..149, b 150..299."""
    root = tmp_path_factory.mktemp("sources")
    a = [[list(range(0, 70))], [list(range(70, 150))]]
    b = [[list(range(150, 300))]]
    return write_folder(root / "a", tokenizer_json, train=a), write_folder(root / "b", tokenizer_json, train=b)


@pytest.fixture(scope="module")
def mixed(folders: tuple[Path, Path]) -> OpenData:
    return open_data(DataConfig(seq_len=SEQ_LEN, sources={str(folders[0]): 1, str(folders[1]): 3}), 7, GLOBAL_BATCH)


def all_rows(data: OpenData, steps: int) -> np.ndarray:
    loader = data.loader(slice(0, GLOBAL_BATCH))
    rows = np.stack([loader.batch(step) for step in range(steps)])
    loader.close()
    return rows


def test_rows_are_consecutive_tokens_of_their_sample(mixed: OpenData) -> None:
    rows = all_rows(mixed, 5)
    assert rows.shape == (5, GLOBAL_BATCH, SEQ_LEN + 1) and rows.dtype == np.int32
    assert (np.diff(rows) == 1).all()
    samples = mixed.order.samples(0, 5 * GLOBAL_BATCH)
    assert rows[:, :, 0].ravel().tolist() == (samples.sources * 150 + samples.windows * SEQ_LEN).tolist()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4)), min_size=1, max_size=5))
def test_any_restarts_at_any_world_size_read_the_same_rows(mixed: OpenData, runs: list[tuple[int, int]]) -> None:
    """Each run is (ranks, steps until it is stopped); the next goes on where it was."""
    step, seen = 0, []
    for ranks, steps in runs:
        size = GLOBAL_BATCH // ranks
        loaders = [mixed.loader(slice(rank * size, (rank + 1) * size)) for rank in range(ranks)]
        for _ in range(steps):
            seen.append(np.concatenate([loader.batch(step) for loader in loaders]))
            step += 1
        for loader in loaders:
            loader.close()
    np.testing.assert_array_equal(np.stack(seen), all_rows(mixed, step))


def test_one_epoch_reads_every_window_once(folders: tuple[Path, Path]) -> None:
    data = open_data(DataConfig(seq_len=SEQ_LEN, sources={str(folders[0]): 1}), 0, 6)
    starts = np.concatenate([data.loader(slice(0, 6)).read(step)[:, 0] for step in range(3)])  # 18 windows
    assert sorted(starts.tolist()) == list(range(0, 144, SEQ_LEN))


def test_steps_may_be_asked_for_in_any_order(mixed: OpenData) -> None:
    loader, rows = mixed.loader(slice(2, 5)), all_rows(mixed, 9)
    for step in (4, 5, 0, 8, 8, 1):
        np.testing.assert_array_equal(loader.batch(step), rows[step, 2:5])
    loader.close()


def test_rows_must_be_consecutive(mixed: OpenData) -> None:
    with pytest.raises(ValueError, match="consecutive"):
        mixed.loader(slice(0, 12, 2))


def test_stages_take_over_at_their_step(folders: tuple[Path, Path]) -> None:
    a, b = map(str, folders)
    data = open_data(
        DataConfig(seq_len=SEQ_LEN, sources={a: 1}, stages=(DataStage(from_step=2, sources={b: 1}),)), 0, 12
    )
    rows = all_rows(data, 4)
    assert (rows[:2] < 150).all() and (rows[2:] >= 150).all()


def test_an_error_while_reading_ahead_surfaces_in_its_step(make_folder: MakeFolder) -> None:
    folder = make_folder("a", train=[[list(range(100))], [list(range(100, 200))]])
    damage(folder / "train-00001.bin", 50)
    data = open_data(DataConfig(seq_len=10, sources={str(folder): 1}), 1, 1)
    loader = data.loader(slice(0, 1))
    healthy = data.order.samples(0, 19).windows < 9  # window 9 reaches into the damaged shard
    for step in range(19):
        if healthy[step]:
            loader.batch(step)
            continue
        for _ in range(2):  # and again when the step is asked for again
            with pytest.raises(BadShard, match=r"train-00001\.bin"):
                loader.batch(step)
    loader.close()


def test_sources_default_to_what_is_prepared(folders: tuple[Path, Path]) -> None:
    data = open_data(DataConfig(seq_len=SEQ_LEN, prepare=PrepareConfig(out=folders[0])), 0, 4)
    assert [source.folder for source in data.sources] == [folders[0]]
    assert data.eod_id == 0 and data.vocab_size == 300 and data.tokenizer.decode(data.tokenizer.encode("def")) == "def"


def test_identity_follows_data_and_sequence_length(folders: tuple[Path, Path]) -> None:
    def identity(seq_len: int, *sources: Path) -> str:
        return open_data(DataConfig(seq_len=seq_len, sources={str(s): 1 for s in sources}), 0, 4).identity

    a, b = folders
    assert identity(8, a) == identity(8, a)
    assert len({identity(8, a), identity(9, a), identity(8, b), identity(8, a, b)}) == 4


def test_sources_of_different_tokenizers_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    train(["another text"], 257, tmp_path / "tokenizer.json")
    other = write_folder(tmp_path / "other", tmp_path / "tokenizer.json", train=[[[1, 2, 3, 0]]])
    with pytest.raises(UserError, match=f"{folders[0]} and {other} were prepared with different tokenizers"):
        open_data(DataConfig(seq_len=2, sources={str(folders[0]): 1, str(other): 1}), 0, 4)


def test_stages_out_of_order_are_refused(folders: tuple[Path, Path]) -> None:
    stages = tuple(DataStage(from_step=step, sources={str(folders[1]): 1}) for step in (5, 5))
    with pytest.raises(UserError, match=r"from_step = \[5, 5\] must ascend"):
        open_data(DataConfig(seq_len=2, sources={str(folders[0]): 1}, stages=stages), 0, 4)


def test_corpus_shorter_than_a_sequence_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(
        UserError, match=r"seq_len = 150: the train split .* has only 150 tokens.*seq_len = 149 or less"
    ):
        open_data(DataConfig(seq_len=150, sources={str(folders[0]): 1}), 0, 4)


def test_skipped_samples_are_read_by_no_step_and_the_next_ones_move_up(mixed: OpenData) -> None:
    skipped = [(5, 9), (24, 36)]
    kept_samples = [i for i in range(5 * GLOBAL_BATCH) if not any(a <= i < b for a, b in skipped)]
    expected = all_rows(mixed, 5).reshape(-1, SEQ_LEN + 1)[kept_samples]
    loaders = [mixed.loader(slice(rank * 4, (rank + 1) * 4)) for rank in range(3)]
    for loader in loaders:
        loader.batch(0)  # has read ahead what is skipped now
        loader.skip(skipped)
    rows = [np.concatenate([loader.batch(step) for loader in loaders]) for step in range(3)]
    for loader in loaders:
        loader.close()
    np.testing.assert_array_equal(np.concatenate(rows), expected[: 3 * GLOBAL_BATCH])


def quarantined(data: OpenData, rows: slice, order: list[int]) -> tuple[dict[int, np.ndarray], set[int]]:
    """The rows of these steps, read by one who learns of bad shards as he meets them; and the samples replaced."""
    loader = data.loader(rows)
    found: dict[int, np.ndarray] = {}
    replaced: set[int] = set()
    for step in order:
        while step not in found:
            try:
                found[step] = loader.batch(step)
            except BadShard as problem:
                loader.quarantine([problem.place])
        replaced |= set(loader.replaced(step))
    loader.close()
    return found, replaced


def test_samples_of_a_bad_shard_are_replaced_alike_by_whoever_meets_it_whenever(make_folder: MakeFolder) -> None:
    folder = make_folder("a", train=[[list(range(s * 50, s * 50 + 50))] for s in range(6)])
    damage(folder / "train-00001.bin", 30)
    (folder / "train-00004.bin").write_bytes(b"")
    data = open_data(DataConfig(seq_len=9, sources={str(folder): 1}, on_bad_shard="skip"), 3, 4)
    steps = list(range(12))
    rows, replaced = quarantined(data, slice(0, 4), steps)
    backwards, _ = quarantined(data, slice(0, 4), steps[::-1])
    half, replaced_of_half = quarantined(data, slice(2, 4), steps)
    for step in steps:
        assert not np.isin(rows[step], [*range(50, 100), *range(200, 250)]).any()
        np.testing.assert_array_equal(rows[step], backwards[step])
        np.testing.assert_array_equal(rows[step][2:], half[step])
    windows = data.order.samples(0, 48).windows
    bad = {i for i, w in enumerate(windows.tolist()) if {w * 9 // 50, (w * 9 + 9) // 50} & {1, 4}}
    assert replaced == bad and replaced_of_half == {i for i in bad if i % 4 >= 2}


def test_a_source_of_bad_shards_only_is_refused(make_folder: MakeFolder) -> None:
    folder = make_folder("a", train=[[list(range(100))]])
    data = open_data(DataConfig(seq_len=9, sources={str(folder): 1}, on_bad_shard="skip"), 3, 4)
    damage(folder / "train-00000.bin", 30)
    loader = data.loader(slice(0, 4))
    with pytest.raises(BadShard, match="checksum"):
        loader.batch(0)
    loader.quarantine([(str(folder), 0)])
    with pytest.raises(DataError, match="hardly any shard"):
        loader.batch(0)
    loader.close()


def test_a_shard_that_is_cut_off_is_refused_at_once_unless_it_may_be_skipped(make_folder: MakeFolder) -> None:
    folder = make_folder("a", train=[[list(range(100))]])
    (folder / "train-00000.bin").write_bytes(b"1234")
    with pytest.raises(DataError, match="has 4 bytes instead of 200"):
        open_data(DataConfig(seq_len=9, sources={str(folder): 1}), 0, 4)
    open_data(DataConfig(seq_len=9, sources={str(folder): 1}, on_bad_shard="skip"), 0, 4)


def test_the_samples_that_are_fetched_ahead_are_those_of_the_steps_also_in_a_ramp(folders):
    batches = BatchSizes(GLOBAL_BATCH, ((2, GLOBAL_BATCH // 2),))
    data = open_data(DataConfig(seq_len=SEQ_LEN, sources={str(folders[0]): 1, str(folders[1]): 3}), 7, batches)
    loader = data.loader(slice(GLOBAL_BATCH // 2, GLOBAL_BATCH))
    loader.skip([(1, 3)])
    ahead, steps = loader.samples_of_steps(1, 5)
    one_by_one = Samples.joined([loader.samples(step) for step in range(1, 5)])
    assert steps.tolist() == [step for step in range(1, 5) for _ in range(len(loader.samples(step).windows))]
    assert ahead.windows.tolist() == one_by_one.windows.tolist()
    assert ahead.sources.tolist() == one_by_one.sources.tolist()


def test_samples_that_are_looked_up_while_the_order_changes_are_not_kept(mixed: OpenData) -> None:
    order, is_asked, may_go_on = Shifted(mixed.order), Event(), Event()
    loader = replace(mixed, order=order).loader(slice(0, GLOBAL_BATCH))
    with ThreadPoolExecutor(1) as thread:
        order.on_samples = lambda: (is_asked.set(), may_go_on.wait())
        before = thread.submit(loader.read, 0)
        is_asked.wait()
        order.shift, order.on_samples = GLOBAL_BATCH, lambda: None
        loader.again()
        may_go_on.set()
        assert np.array_equal(before.result(), all_rows(mixed, 1)[0])
    assert np.array_equal(loader.read(0), all_rows(mixed, 2)[1])
    loader.close()


class Shifted:
    """An order that begins `shift` samples later."""

    def __init__(self, order: Order):
        self._order, self.shift = order, 0
        self.on_samples: Callable[[], object] = lambda: None

    def samples(self, start: int, stop: int) -> Samples:
        shift = self.shift
        self.on_samples()
        return self._order.samples(start + shift, stop + shift)


def test_special_tokens_need_an_embedding_where_a_template_writes_them(tokenizer_json: Path, tmp_path: Path) -> None:
    content = json.loads(tokenizer_json.read_text())
    for number, token in enumerate(("<|im_end|>", "<|picture|>"), 300):
        content["added_tokens"].append(content["added_tokens"][0] | {"id": number, "content": token})
        content["model"]["vocab"][token] = number
    (tmp_path / "more.json").write_text(json.dumps(content))
    folder = write_folder(tmp_path / "chats", tmp_path / "more.json", train=[[[1, 2, 3, 4] * 8]])
    data = open_data(DataConfig(sources={str(folder): 1.0}, seq_len=4), 0, 1)
    assert (data.vocab_size, data.least_vocab_size) == (302, 300)
    for template in (CHATML, CHATML.replace("<|im_end|>", "<|' + 'im_end|>")):
        (folder / TEMPLATE).write_text(template)
        assert data.least_vocab_size == 301
