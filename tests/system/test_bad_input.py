"""Bad input gets one clear message with what is wrong and what to do, exit code 2, and nothing is half-written."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from argosy.models import hf
from argosy.plan.hardware.local_machine import cores_here
from commands import Folder
from tiny import decoder

Refused = Callable[..., str]


def edited(path: Path, old: str, new: str) -> Path:
    """The run file with one thing changed."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps = 10", "steps = = 10", ("run.toml:18:9", "Invalid value")),
        ("steps = 10", 'steps = "ten"', ("run.toml:18", "train.steps", "ten")),
        ("steps = 10", "steps = -1", ("run.toml:18", "train.steps = -1")),
        ("lr = 1e-2", "lrr = 1e-2", ("run.toml:22", "lrr", "lr")),
        ("lr = 1e-2", "learning_rate = 1e-2", ("run.toml:22", "optimizer.lr")),
        ("[optimizer]\nlr", "[parallel]\nlr", ("run.toml:22", "optimizer.lr")),
        ("kv_heads = 2", "kv_heads = 3", ("run.toml:9", "kv_heads = 3", "does not divide")),
        (
            "dp_replicate=2",
            "dp_shard=2,ep=2",
            ("plan.ep = 2, and the model has no experts", "Plans near it", "dp_shard=2"),
        ),
        ("dp_replicate=2", "dp_replicate=4", ("(run.toml:", "launch.processes = 2 (run.toml:", "Try")),
        pytest.param("microbatch=2", "microbatch=3", ("train.global_batch = 8", "Try 6 or 12"), marks=pytest.mark.slow),
        ("seq_len = 32", "seq_len = 1000000", ("seq_len",)),
    ],
)
def test_a_wrong_run_file_is_refused_with_line_and_remedy(
    folder: Folder, refused: Refused, old: str, new: str, said: tuple[str, ...]
) -> None:
    edited(folder.write_run(), old, new)
    refused("train", "run.toml", said=said)
    assert not list(folder.path.glob("runs/*/checkpoints"))


def test_credentials_in_a_url_are_refused_and_written_nowhere(folder: Folder, refused: Refused) -> None:
    folder.write_run()
    said = refused("train", "run.toml", "--checkpoint.remote", "s3://AKIA:sEcr3t@bucket", said=("checkpoint.remote",))
    assert "sEcr3t" not in said
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert not any(b"sEcr3t" in path.read_bytes() for path in files)


def test_the_command_itself_ends_with_that_message_and_code(folder: Folder) -> None:
    """The others here are refused in the tests' process."""
    folder.starts_anew = True
    edited(folder.write_run(), "steps = 10", "steps = -1")
    text = folder.argosy("train", "run.toml", code=2)
    assert "run.toml:18" in text and "train.steps = -1" in text and "Traceback" not in text


def test_a_missing_run_file_is_named_with_its_neighbours(folder: Folder, refused: Refused) -> None:
    folder.write_run("mine.toml")
    refused("train", "mien.toml", said=("mien.toml", "mine.toml"))


def test_an_option_that_does_not_exist_is_refused_with_the_nearest(folder: Folder, refused: Refused) -> None:
    folder.write_run()
    refused("train", "run.toml", "--optimizer.lrr", "1", said=("optimizer.lrr", "optimizer.lr"))
    refused("train", "run.toml", "--train.steps", "many", said=("train.steps", "many"))


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("nothing.txt", None, (), ("nothing.txt", "no such file")),
        ("empty.txt", b"", (), ("empty",)),
        ("broken.txt", b"good \xff\xfe bad", ("--on-bad-input", "refuse"), ("broken.txt", "UTF-8")),
        ("broken.jsonl", b'{"text": "good"}\n{"text": \n', ("--on-bad-input", "refuse"), ("broken.jsonl", "line 2")),
        ("other.jsonl", b'{"content": "words"}\n', ("--on-bad-input", "refuse"), ("other.jsonl", "text", "content")),
    ],
)
def test_text_that_cannot_be_prepared_is_refused(
    folder: Folder, refused: Refused, name: str, content: bytes | None, options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    if content is not None:
        (folder.path / name).write_bytes(content)
    refused("prepare", name, "--out", "out", *options, said=said)


def test_broken_records_are_skipped_and_counted_by_default(folder: Folder) -> None:
    good = b'{"text": "some words that are fine, and a few more of them"}\n' * 50
    (folder.path / "mixed.jsonl").write_bytes(good + b"{broken\n" + b'{"text": "\xff"}\n' + good)
    text = folder.argosy_here("prepare", "mixed.jsonl", "--out", "out", "--vocab-size", "300", "--json")
    assert '"skipped"' in text
    assert text.count("1") >= 2


@pytest.fixture
def base(folder: Folder) -> tuple[str, ...]:
    """The options of a model to fine-tune: a Hugging Face folder, without a chat template."""
    model = decoder()
    hf.export_folder(model.config, model.state_dict(), folder.path / "hf", dtype=torch.float32)
    shutil.copy(folder.corpus / "tokenizer.json", folder.path / "hf")
    return ("train", "--model.weights", "hf", "--data.prepare.input", "chats.jsonl", "--lora.rank", "2")


GOOD = {"prompt": "1?", "completion": "2", "chosen": "2", "rejected": "no"}
TALK = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant") * 2]
HIDES = "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '' }}{% endfor %}"


@pytest.mark.parametrize(
    ("bad", "options", "said"),
    [
        ({"messages": TALK}, ("--chat-template", "hides.jinja"), ("line 31: the chat template writes",)),
        ({"messages": TALK[1:]}, (), ("line 31: messages: message 0 is of the assistant", "roles in a wrong order")),
        ({"prompt": "1?", "completion": " "}, (), ("line 31", "says nothing: empty answer")),
        ({**GOOD, "rejected": "2"}, ("--objective", "dpo"), ("line 31", "equal sides")),
        ("{", (), ("line 31, column 2", "broken JSON")),
    ],
    ids=["template", "roles", "empty", "equal", "broken"],
)
def test_a_bad_conversation_is_refused_by_its_line(
    folder: Folder, refused: Refused, bad: object, options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    write_chats(folder, bad)
    (folder.path / "hides.jinja").write_text(HIDES)
    usual = ("--tokenizer", folder.corpus / "tokenizer.json", "--objective", "sft", "--chat-template", "chatml")
    said = (f"argosy: {folder.path / 'chats.jsonl'}, ", *said, "leave such input out: --on-bad-input skip")
    words = ("prepare", "chats.jsonl", "--out", "out", *usual, "--seq-len", "32", "--on-bad-input", "refuse")
    refused(*words, *options, said=said)


def write_chats(folder: Folder, bad: object) -> None:
    """Write 31 conversations, of which the last is bad."""
    lines = [json.dumps(GOOD)] * 30 + [bad if isinstance(bad, str) else json.dumps(bad)]
    (folder.path / "chats.jsonl").write_text("\n".join(lines))


def test_a_run_refuses_a_bad_conversation_with_its_own_key(
    folder: Folder, refused: Refused, base: tuple[str, ...]
) -> None:
    write_chats(folder, "{")
    usual = ("--train.objective", "sft", "--data.prepare.chat-template", "chatml")
    said = ("chats.jsonl, line 31, column 2", "leave such input out: --data.prepare.on-bad-input skip")
    refused(*base, *usual, "--data.prepare.on-bad-input", "refuse", said=said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), ("hf: it has no chat template", "Give --data.prepare.chat-template: a jinja file, or chatml.")),
        (("--data.prepare.chat-template", "chatml", "--lora.targets", "qq"), ('lora.targets: "qq" matches no linear',)),
    ],
    ids=["no template", "targets"],
)
def test_a_model_that_cannot_be_tuned_so_is_refused_before_data_are_prepared(
    folder: Folder, refused: Refused, base: tuple[str, ...], options: tuple[str, ...], said: tuple[str, ...]
) -> None:
    (folder.path / "chats.jsonl").write_text(json.dumps(GOOD))
    refused(*base, "--train.objective", "sft", *options, said=said)


def test_a_parquet_file_without_the_column_is_refused_with_those_it_has(folder: Folder, refused: Refused) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a", "b"], "id": [1, 2]}), folder.path / "data.parquet")
    refused("prepare", "data.parquet", "--out", "out", said=("data.parquet", "text", "body"))


def test_a_flipped_byte_in_a_shard_stops_the_run_and_names_the_file(folder: Folder) -> None:
    corpus = shutil.copytree(folder.corpus, folder.path / "damaged")
    shard = next(corpus.glob("train-*.bin"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    edited(folder.write_run(), str(folder.corpus), str(corpus))
    assert shard.name in folder.argosy_here("train", "run.toml", code=65)
    assert shard.name in folder.argosy_here("prepare", "--out", "damaged", "--verify", code=65)


def test_data_of_another_tokenizer_is_refused(folder: Folder, refused: Refused) -> None:
    corpus = shutil.copytree(folder.corpus, folder.path / "other")
    tokenizer = corpus / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    edited(folder.write_run(), str(folder.corpus), str(corpus))
    refused("train", "run.toml", said=("tokenizer.json",))


def test_a_port_in_use_is_named(folder: Folder, refused: Refused) -> None:
    folder.write_run()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused("train", "run.toml", "--launch.port", port, said=(f"launch.port = {port}", "in use"))


@pytest.mark.slow
def test_more_processes_than_cores_is_a_warning(folder: Folder) -> None:
    cores = cores_here()
    edited(folder.write_run(steps=2), "dp_replicate=2,microbatch=2", f"dp_replicate={cores + 1},microbatch=1")
    text = folder.argosy("train", "run.toml", "--launch.processes", cores + 1, "--train.global_batch", cores + 1)
    assert f"launch.processes = {cores + 1}" in text


def test_checkpoint_commands_refuse_what_is_not_there(folder: Folder, refused: Refused) -> None:
    refused("checkpoint", "verify", "nowhere", said=("nowhere", "no such folder"))
    refused("generate", "nowhere", said=("nowhere",))
    refused("checkpoint", "lsit", said=("lsit", "list"))
    refused("checkpoint", "import", ".", "--out", "x", said=("config.json",))
