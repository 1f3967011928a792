"""From the run that was asked for to the run that is trained."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from argosy.checkpoint import store
from argosy.config.load import load
from argosy.config.sync import SiteConfig
from argosy.data.manifest import TOKENIZER, Manifest
from argosy.errors import UserError
from argosy.launch.resolve import check_memory, resolve, with_known_length, with_known_sizes
from argosy.observe.screen import Progress
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices
from tiny import MODEL, SOURCES, prepare_corpus, run_config

QUIET = Progress(enabled=False)


def test_the_vocabulary_is_that_of_the_data_where_the_run_does_not_say(corpus):
    run, data = resolve(run_config(corpus, model={"vocab_size": 0}), QUIET)
    assert run.model.vocab_size == data.vocab_size == MODEL["vocab_size"]


def test_a_run_that_says_all_stays_as_it_is(corpus):
    asked = run_config(corpus)
    assert resolve(asked, QUIET)[0] == asked
    larger = run_config(corpus, model={"vocab_size": 512})
    assert resolve(larger, QUIET)[0] == larger


@pytest.mark.parametrize("epochs", [0.001, 0.5, 1.0, 2.25])
def test_a_run_in_epochs_has_the_fewest_steps_that_read_so_much(corpus, epochs):
    asked = run_config(corpus, train={"steps": 0, "epochs": epochs, "minutes": 4.0})
    run, data = resolve(asked, QUIET)
    steps, batch, windows = run.train.steps, run.train.global_batch, data.sources[0].windows(run.data.seq_len)
    assert (steps - 1) * batch < epochs * windows <= steps * batch
    visited = data.order.samples(0, steps * batch)
    assert len(set(visited.windows.tolist())) >= min(windows, epochs * windows)
    assert resolve(run, QUIET)[0] == run  # as it stands in run.toml
    assert with_known_length(asked).train.steps == steps  # nothing was to be prepared


def test_evaluations_read_what_there_is_of_held_out_text(corpus):
    there = sum(shard.tokens for shard in Manifest.load(corpus, check_shards=False).splits["validation"])
    for asked, read in ((10**9, there), (there - 1, there - 1)):
        assert with_known_length(run_config(corpus, evaluate={"tokens": asked})).evaluate.tokens == read


def test_epochs_are_the_number_that_is_written(corpus):
    data = resolve(run_config(corpus), QUIET)[1].sources[0]
    seq_len = next(n for n in range(8, 99) if math.ceil(1.1 * data.windows(n)) > -(-11 * data.windows(n) // 10))
    train = {"steps": 0, "epochs": 1.1, "global_batch": 1}
    run, _ = resolve(run_config(corpus, train=train, data={"seq_len": seq_len}), QUIET)
    assert run.train.steps == -(-11 * data.windows(seq_len) // 10)


def test_epochs_are_refused_beside_other_steps_or_in_a_mixture(corpus, other):
    with pytest.raises(UserError, match=r"train\.steps = 3 and train\.epochs = 2, which are \d+ steps of"):
        resolve(run_config(corpus, train={"steps": 3, "epochs": 2.0}), QUIET)
    mixed = {str(corpus): 1.0, str(shutil.copytree(corpus, other / "copy")): 2.0}
    with pytest.raises(UserError, match=r"train\.epochs = 2 with 2 data sources: .* Give train\.steps"):
        resolve(run_config(corpus, data={"sources": mixed}, train={"steps": 0, "epochs": 2.0}), QUIET)


def test_a_vocabulary_smaller_than_that_of_the_data_is_refused(corpus):
    with pytest.raises(UserError, match=r"model\.vocab_size = 100 is smaller .* Try model\.vocab_size = 0"):
        resolve(run_config(corpus, model={"vocab_size": 100}), QUIET)


def test_a_reward_model_that_is_to_learn_words_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.score = true: .* Set score = false, or objective = \"reward\""):
        resolve(run_config(tmp_path, model={"score": True}), QUIET)


def test_a_prompt_that_fills_the_context_is_refused(corpus):
    with pytest.raises(UserError, match=r"evaluate\.sample_prompt: it has \d+ tokens and model\.max_seq_len is 128"):
        resolve(run_config(corpus, model={"max_seq_len": 128}, evaluate={"sample_prompt": "0" * 400}), QUIET)


def test_a_run_without_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no data to train on"):
        resolve(run_config(tmp_path, data={"sources": {}}), QUIET)


def test_a_run_that_says_what_to_prepare_gets_it_prepared_once(tmp_path):
    prepare = {
        "input": (str(SOURCES / "errors.py"),),
        "out": tmp_path,
        "vocab_size": 300,
        "processes": 1,
        "validation_fraction": 0.0,
    }
    asked = run_config(tmp_path, data={"sources": {}, "prepare": prepare}, model={"vocab_size": 0})
    run, _ = resolve(asked, QUIET)
    assert run.data.sources == {str(tmp_path): 1.0}
    first = (tmp_path / "manifest.json").stat().st_mtime_ns
    assert resolve(asked, QUIET)[0] == run
    assert (tmp_path / "manifest.json").stat().st_mtime_ns == first
    assert Manifest.load(tmp_path).tokens("train") > 0


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of the same vocabulary as the corpus, prepared with a tokenizer of their own."""
    return prepare_corpus(tmp_path_factory.mktemp("other"), input=(str(SOURCES / "_internal"),))


@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_weights_and_data_of_different_tokenizers_are_refused(corpus, other, named, tmp_path):
    run_dir = tmp_path / "run"
    weights = run_dir if named == "run" else run_dir / "checkpoints" / "step-00000004"
    weights.mkdir(parents=True)
    shutil.copy(corpus / TOKENIZER, run_dir)
    assert resolve(run_config(corpus, model={"weights": weights}), QUIET)
    wrong = run_config(other, model={"weights": weights, "vocab_size": 0})
    remedy = re.escape(f"argosy prepare TEXT --tokenizer {weights} --out NEW-FOLDER")
    with pytest.raises(UserError, match=rf"model\.weights = {weights}: {other} was prepared .*{remedy}"):
        resolve(wrong, QUIET)
    (run_dir / TOKENIZER).unlink()
    assert resolve(wrong, QUIET), "nobody knows"


@pytest.mark.parametrize("spell", [str, lambda path: f"file://{path}"], ids=["folder", "url"])
def test_text_is_prepared_with_the_tokenizer_of_the_weights_and_no_other(corpus, other, tmp_path, spell):
    prepare = {"input": (str(SOURCES / "errors.py"),), "out": tmp_path / "new", "processes": 1}
    named = {"sources": {}, "prepare": {**prepare, "tokenizer": other}}
    with pytest.raises(UserError, match=r"data\.prepare\.tokenizer = .* gives the data another .*--tokenizer"):
        resolve(run_config(corpus, data=named, model={"weights": spell(corpus)}), QUIET)
    assert not (tmp_path / "new").exists()
    _, data = resolve(
        run_config(corpus, data={"sources": {}, "prepare": prepare}, model={"weights": spell(corpus)}), QUIET
    )
    assert data.sources[0].manifest.tokenizer_sha256 == Manifest.load(corpus).tokenizer_sha256


@pytest.mark.parametrize("objective", ["pretrain", "sft"])
@pytest.mark.parametrize("spell", [str, lambda path: f"file://{path}"], ids=["folder", "url"])
def test_no_new_tokenizer_is_trained_for_weights_that_lack_theirs(tmp_path, spell, objective):
    (weights := tmp_path / "opt").mkdir()
    for name in ("config.json", "vocab.json"):
        (weights / name).write_text("{}")
    data = {"sources": {}, "prepare": {"input": (str(SOURCES / "errors.py"),), "out": tmp_path / "new"}}
    asked = run_config(tmp_path, data=data, model={"weights": spell(weights)}, train={"objective": objective})
    with pytest.raises(UserError, match=r"opt: tokenizer\.json is not there, .*from_pretrained\('.*opt'\)\.save"):
        resolve(asked, QUIET)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("rank", [0, 2])
def test_an_adapter_alone_is_refused_as_weights_before_the_data_are_prepared(corpus, tmp_path, monkeypatch, rank):
    shutil.copy(corpus / TOKENIZER, tmp_path)
    alone = SimpleNamespace(folder=tmp_path / "step-00000001", manifest=SimpleNamespace(base_sha256="5a"))
    monkeypatch.setattr(store, "find", lambda path, check: alone)
    data = {"sources": {}, "prepare": {"input": (str(SOURCES / "errors.py"),), "out": tmp_path / "new"}}
    with pytest.raises(UserError, match=r"model\.weights = .* holds an adapter alone.*argosy checkpoint merge"):
        resolve(run_config(tmp_path, data=data, model={"weights": tmp_path}, lora={"rank": rank}), QUIET)
    assert not (tmp_path / "new").exists()


def test_a_cluster_that_is_none_is_refused_before_the_data_are_looked_at(tmp_path):
    with pytest.raises(UserError, match=r"launch\.cluster: no device is called 'h1000'; did you mean h100"):
        resolve(run_config(tmp_path / "no data", launch={"cluster": "8xh1000"}), QUIET)


def test_a_clusters_file_is_found_again_from_elsewhere(corpus, tmp_path, monkeypatch):
    Cluster.parse("8xh100").save(tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    run, _ = resolve(run_config(corpus, launch={"cluster": "mine.toml"}), QUIET)
    assert run.launch.cluster == str(tmp_path / "mine.toml")
    assert resolve(run_config(corpus, launch={"cluster": "8xh100"}), QUIET)[0].launch.cluster == "8xh100"


def test_the_vocabulary_of_data_that_are_not_prepared_yet_is_the_one_that_preparing_gives(tmp_path):
    out = tmp_path / "data"
    run = load("demo", {"data.prepare.out": str(out), "data.prepare.vocab_size": 512})
    assert with_known_sizes(run).model.vocab_size == 512
    without = load("demo", {"data.prepare.input": [], "data.prepare.out": str(out)})
    assert with_known_sizes(without).model.vocab_size == 0
    assert not out.exists()


CPU = Devices(2, "cpu", fast_bf16=False)
LARGE = {"layers": 32, "width": 4096, "heads": 32, "head_width": 128, "ffn_width": 14336}


def test_a_plan_that_cannot_fit_the_host_is_refused_before_weights_are_made(corpus, monkeypatch):
    large = run_config(corpus, model=LARGE)
    monkeypatch.setattr("argosy.launch.resolve.host_memory_bytes", lambda: 23 * 2.0**30)
    with pytest.raises(
        UserError, match=r"of the host's memory for each process, which may take 11\.5 GiB\. No plan fits"
    ):
        check_memory(large, Plan(dp_replicate=2), CPU)
    check_memory(run_config(corpus, model=LARGE, launch={"allow_memory": True}), Plan(dp_replicate=2), CPU)
    check_memory(run_config(corpus), Plan(dp_replicate=2), CPU)


def test_sites_on_one_machine_share_its_memory(corpus, monkeypatch):
    monkeypatch.setattr("argosy.launch.resolve.host_memory_bytes", lambda: 24 * 2.0**30)
    sites = tuple(SiteConfig(name=name, address=f"{host}:7000") for name, host in (("a", "m"), ("b", "m"), ("c", "n")))
    for site, has in (("a", r"6\.0"), ("c", r"12\.0")):
        run = run_config(corpus, model=LARGE).model_copy(update={"sites": sites, "site": site})
        with pytest.raises(UserError, match=rf"which may take {has} GiB"):
            check_memory(run, Plan(dp_replicate=2), CPU)


def test_the_nearest_plan_that_fits_is_named(corpus, monkeypatch):
    monkeypatch.setattr("argosy.launch.resolve.host_memory_bytes", lambda: 800 * 2.0**30)
    gpus = Devices(4, "cuda", fast_bf16=True, name="NVIDIA H100 80GB HBM3", memory_bytes=79 * 2.0**30)
    with pytest.raises(
        UserError, match=r"of each device, which may take 79\.0 GiB\. The nearest plan that fits: \""
    ) as no:
        check_memory(run_config(corpus, model=LARGE), Plan(dp_replicate=4, precision="bf16"), gpus)
    plan = Plan.parse(str(no.value).split('"')[3])
    check_memory(run_config(corpus, model=LARGE), plan, gpus)


def test_the_limit_of_a_process_and_what_is_offloaded_count(corpus, monkeypatch):
    monkeypatch.setattr("argosy.launch.resolve.process_memory_bytes", lambda: 2.0**27)
    with pytest.raises(UserError, match=r"which may take 0\.1 GiB"):
        check_memory(run_config(corpus, model={**LARGE, "layers": 2}), Plan(dp_replicate=2), CPU)
    gpu = Devices(1, "cuda", fast_bf16=True, name="NVIDIA H100 80GB HBM3", memory_bytes=79 * 2.0**30)
    with pytest.raises(UserError, match=r"of the host's memory for each process"):
        check_memory(run_config(corpus, model={**LARGE, "layers": 8}), Plan(offload="optimizer", precision="bf16"), gpu)
