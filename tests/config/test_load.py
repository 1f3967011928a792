"""The run file: what wins over what, where paths start, and that nothing in it is ignored."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.config.dump import dump, save_run
from argosy.config.load import OF_OBJECTIVE, load, model_name, origin_of
from argosy.config.problems import ELSEWHERE
from argosy.config.schema import RunConfig
from argosy.errors import UserError


@pytest.fixture
def run_file(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path, overrides: dict[str, object] | None = None) -> list[str]:
    """The lines of the error that loading `path` gives, without its folder."""
    with pytest.raises(UserError) as error:
        load(path, overrides)
    return str(error.value).replace(f"{path.parent}/", "").splitlines()


def test_no_source_is_the_demo_and_an_empty_file_is_the_defaults(run_file):
    assert load().name == "demo"
    assert load().model.preset == "llama-5m"
    assert load(run_file("")) == load(run_file("# nothing\n"))


def test_file_wins_over_preset_and_override_over_both(run_file):
    path = run_file('model = {preset = "llama-20m", layers = 3, ffn_width = 640}')
    model = load(path, {"model.ffn_width": 512}).model
    assert (model.width, model.layers, model.ffn_width) == (512, 3, 512)


@pytest.mark.parametrize("preset", ['preset = "mixtral-10m", ', ""])
def test_a_preset_in_an_override_is_the_model_in_place_of_the_files(run_file, preset):
    written = run_file(f"model = {{{preset}layers = 3, norm_eps = 1e-3, moe = {{experts = 4}}, init_std = 0.01}}")
    expected = load(run_file('model = {preset = "llama-60m", init_std = 0.01}'))
    assert load(written, {"model.preset": "llama-60m"}) == expected
    resolved = run_file(dump(load(written)))
    assert load(resolved, {"model.preset": "llama-60m"}) == expected
    assert load(resolved, {"model.preset": "llama-60m", "model.layers": 3}).model.layers == 3


def test_an_override_may_be_a_table(run_file):
    run = load(run_file("train = {steps = 5, global_batch = 7}"), {"train": {"steps": 6}})
    assert (run.train.steps, run.train.global_batch) == (6, 7)


@pytest.mark.parametrize(
    ("written", "plan"),
    [
        ('plan = "tp=2"', "tp=2"),
        ("[plan]\ntp = 2\ndp_replicate = 4", "tp=2,dp_replicate=4"),
        ('[plan]\nprecision = "fp32"\nauto = true', "auto,precision=fp32"),
        ("[plan]\nauto = false\ncompile = false", "compile=false"),
    ],
)
def test_a_plan_is_a_string_or_a_table(run_file, written, plan):
    assert load(run_file(written)).plan == plan


def test_paths_of_a_file_start_at_the_file(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    run = load(
        run_file(
            """
            [data]
            sources = {"a" = 1, "../b" = 2, "/c" = 3}
            stages = [{from_step = 9, sources = {"d" = 1}}]
            [data.prepare]
            input = ["e/*.txt", "s3://bucket/f", "builtin:python"]
            tokenizer = "t.json"
            chat_template = "chat.jinja"
            """
        )
    )
    assert list(run.data.sources) == [f"{tmp_path}/a", f"{tmp_path.parent}/b", "/c"]
    assert list(run.data.stages[0].sources) == [f"{tmp_path}/d"]
    assert run.data.prepare.input == (f"{tmp_path}/e/*.txt", "s3://bucket/f", "builtin:python")
    assert run.data.prepare.tokenizer == tmp_path / "t.json"
    assert run.data.prepare.out == tmp_path / "data/prepared"
    assert run.data.prepare.chat_template == f"{tmp_path}/chat.jinja"
    assert load(run_file('data.prepare.chat_template = "chatml"')).data.prepare.chat_template == "chatml"
    for remote, there in (("copies", f"{tmp_path}/copies"), ("s3://bucket/g", "s3://bucket/g"), ("", "")):
        assert load(run_file(f'checkpoint.remote = "{remote}"')).checkpoint.remote == there


def test_paths_of_presets_and_overrides_start_in_the_current_folder(run_file, tmp_path, monkeypatch):
    path = run_file("")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert load("demo").data.prepare.out == tmp_path / "here/data/python"
    assert load(path, {"data.prepare.out": "x"}).data.prepare.out == tmp_path / "here/x"


def test_a_float_without_fraction_is_a_whole_number(run_file):
    assert load(run_file("data.prepare.max_text_bytes = 24e6")).data.prepare.max_text_bytes == 24_000_000


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(prompt=TEXT, folder=TEXT.filter(bool), lr=st.floats(1e-12, 1e12), steps=st.integers(1, 2**60))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_dumped_run_loads_as_the_same_run(run_file, prompt, folder, lr, steps):
    overrides = {
        "evaluate.sample_prompt": prompt,
        "optimizer.lr": lr,
        "train.steps": steps,
        "data.sources": {f"/{folder.replace('/', '').replace('~', '')}": lr},
        "data.stages": [{"from_step": 3, "sources": {"/a b": 2.0}}],
        "data.prepare.input": ["x", "builtin:python"],
        "model.preset": "llama3.2-1b",
    }
    run = load("demo", overrides)
    path = run_file("")
    save_run(run, path)
    assert load(path) == run


def test_a_misspelt_key_is_told_before_what_follows_from_it(run_file):
    misspelt = refusal(run_file("[train]\nglobal_batch = 4\n\nstpes = 2\n"))
    assert [line.split(":")[1] for line in misspelt if not line.startswith("  ")] == ["4", "1"]


def test_a_meaning_of_two_lines_is_told_in_one(run_file):
    lines = refusal(run_file("[train]\nsteps = -1\nminutes = 1\n"))
    assert len(lines) == 2 and lines[1].endswith("the speed of the first steps.")


def test_every_problem_of_a_file_is_told_with_its_line(run_file):
    lines = refusal(
        run_file('[optimizer]\nlr = "fast"\n\n[train]\nsteps = -1\nstpes = 2\n[model]\nheads = 6\nkv_heads = 4\n')
    )
    assert [line for line in lines if not line.startswith("  ")] == [
        'run.toml:2: optimizer.lr = "fast": must be a finite number above 0.',
        "run.toml:5: train.steps = -1: must be a whole number of at least 0.",
        "run.toml:6: train.stpes = 2: unknown key; did you mean train.steps?",
        "run.toml:9: model.kv_heads = 4 does not divide heads = 6; try one of [1, 2, 3, 6].",
    ]
    assert lines[1] == "  Try 0.001, the default. Peak learning rate."


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("optimizer.lrr = 1", "did you mean optimizer.lr?"),
        ("optimiser.eps = 1", "did you mean optimizer.eps?"),
        ("parallel.lr = 1", "it exists at optimizer.lr."),
        ("lr = 1", "it exists at optimizer.lr."),
        (
            "model.every_steps = 1",
            "it exists at evaluate.every_steps and at checkpoint.every_steps and at sync.every_steps.",
        ),
        ("optimizer.learning_rate = 1", "here it is optimizer.lr."),
        ("train.batch_size = 1", "here it is train.global_batch."),
        ("hidden_size = 1", "here it is model.width."),
        (
            "launch.zzz = 1",
            "launch has: processes, threads, device, max_restarts, port, nodes, coordinator, lease, address, node, "
            "rank_map, tls, tls_certificate, tls_key, timeout_s, cluster, allow_memory.",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_one_that_was_meant(run_file, written, answer):
    (line,) = refusal(run_file(written))
    assert line.endswith(f"unknown key; {answer}")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ("{epochs = 0}", "say how long, e.g. steps = 1000, minutes = 10 or epochs = 2"),
        ("{epochs = -1}", "train.epochs = -1"),
        ("{epochs = 2, global_batch = 8, batch_ramp = [{until_step = 5, global_batch = 4}]}", "counted in steps"),
    ],
)
def test_epochs_that_say_no_length_are_refused(run_file, train, words):
    assert words in refusal(run_file(f"train = {train}"))[0]


def test_every_synonym_leads_to_a_key_that_exists(run_file):
    from argosy.config.section import dotted, key_fields

    known = {dotted(key) for key in key_fields(RunConfig)}
    for synonym, answer in ELSEWHERE.items():
        assert synonym not in known
        first = answer.split(" ")[0].rstrip(",:")
        assert first in known or "plan" in answer or answer.startswith("the default: "), synonym


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ('train.steps = "100"', "  Try 100, without the quotes."),
        ('train.steps = "30k"', "  Try 30000, without the quotes."),
        ('train.steps = "2.5"', "  Try 0, the default."),
        ('schedule.kind = "cosin"', '  Try "cosine".'),
        ("[train]\nminutes = 0", "run.toml:1: train.steps = 0 and minutes = 0: say how long"),
        ("data.seq_len = 9000", "run.toml:1: data.seq_len = 9000 is more than model.max_seq_len = 8192"),
        ("model = 3", "run.toml:1: model = 3: must be a table, [model], with keys of its own."),
        ("optimizer.lr = nan", "run.toml:1: optimizer.lr = NaN: must be a finite number above 0."),
        ("plan = 2", "run.toml:1: plan = 2: must be text."),
        ("checkpoint.background = 1", "run.toml:1: checkpoint.background = 1: must be true or false."),
        ("data.stages = [{from_step = 2}]", "run.toml:1: data.stages[0].sources is missing."),
        ('data.sources = {"/a" = 0}', 'run.toml:1: data.sources."/a" = 0: input should be greater than 0.'),
        (
            "sync.block = 100",
            "run.toml:1: sync.block = 100: must be a whole number of at least 16 and of at most 65536 and a",
        ),
        ('sync.patience_s = "2m"', "  Try 120, without the quotes."),
        ('[sites]\nname = "a"', 'run.toml:1: sites = {"name": "a"}: must be a list of tables; write [[sites]] before'),
        ('sync.server_launch = "x"', 'run.toml:1: sync.server_launch = "x": must be a list of tables; write [[sync.'),
        (
            'sites = [{name = "a", launch = "ssh"}, {name = "b"}]',
            'run.toml:1: sites[0].launch = "ssh": must be a table, [sites.launch], with keys of its own.',
        ),
        ('model.preset = "llama-6m"', 'run.toml:1: model.preset = "llama-6m": no model preset'),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(run_file, written, line):
    assert any(found.startswith(line) for found in refusal(run_file(written)))


def test_a_wrong_override_is_named_as_one(run_file):
    assert refusal(run_file(""), {"train.steps": -1})[0].startswith("overrides: train.steps = -1: must be")


def test_a_syntax_error_shows_its_line(run_file):
    assert refusal(run_file('name = "x"\nseed 3\n')) == [
        "run.toml:2:6: Expected '=' after a key in a key/value pair.",
        "    seed 3",
        "         ^",
    ]


def test_a_missing_or_unreadable_file_is_said_with_near_names(tmp_path, run_file):
    path = run_file("")
    assert "did you mean run.toml?" in refusal(tmp_path / "rum.toml")[0]
    assert "Try" in refusal(tmp_path)[0]
    assert "there is no folder" in refusal(tmp_path / "no" / "run.toml")[0]
    path.write_bytes(b'name = "\xff"')
    assert "not UTF-8). Save it as UTF-8." in refusal(path)[0]
    (tmp_path / "link.toml").symlink_to("nowhere.toml")
    assert refusal(tmp_path / "link.toml")[0].endswith(
        "link.toml: a link to nowhere.toml, which is not there. Name the run file itself."
    )
    with pytest.raises(UserError, match="did you mean demo"):
        load("dema")


def test_the_json_schema_admits_a_plan_as_a_table():
    kinds = RunConfig.model_json_schema()["properties"]["plan"]["anyOf"]
    assert {"string", "object"} == {kind["type"] for kind in kinds}


def test_the_origin_of_a_value_is_an_option_a_line_or_the_default(run_file):
    path = run_file("seed = 1\n[launch]\nnodes = 2\n")
    assert origin_of(path, "launch.nodes") == f"{path}:3"
    assert origin_of(path, "launch.nodes", {"launch.nodes"}) == "--launch.nodes"
    assert origin_of(path, "launch.processes") == "default"
    assert origin_of(None, "launch.processes").startswith("demo.toml:")


def test_a_whole_number_that_toml_does_not_know_is_refused(run_file):
    with pytest.raises(UserError, match="64 bits, and this is larger"):
        load(run_file(f"[train]\nsteps = 1{'0' * 400}"))


def test_what_is_wrong_on_the_command_line_is_answered_with_the_value_without_it(run_file):
    path = run_file("train.global_batch = 8")
    assert refusal(path, {"train.global_batch": 0})[1].startswith("  Try 8, the default here. ")
    assert refusal(path, {"train.steps": -1})[1].startswith("  Try 0, the default. ")
    assert refusal(run_file("train.global_batch = 0"), {"train.global_batch": 0})[1].startswith(
        "  Try 16, the default."
    )


def test_a_run_s_folder_in_place_of_a_run_file_is_answered_with_the_run_file_in_it(run_file):
    run_file("").with_name("plan.toml").write_text("")
    with pytest.raises(UserError, match=r"a folder, not a run file. Try \S+/run.toml.$"):
        load(run_file("").parent)


CHATS = {"data.prepare.input": ["chats.jsonl"]}


def run_of(**given: Any) -> RunConfig:
    return load(overrides=CHATS | {name.replace("__", "."): value for name, value in given.items()})


@pytest.mark.parametrize("objective", OF_OBJECTIVE)
def test_an_objective_brings_its_rate_length_and_warmup(objective: str) -> None:
    run, usual = run_of(train__objective=objective), OF_OBJECTIVE[objective]
    assert (run.optimizer.lr, run.train.epochs, run.schedule.warmup_fraction) == (usual.lr, usual.epochs, usual.warmup)
    assert (run.train.steps, run.train.minutes, run.optimizer.weight_decay, run.optimizer.beta2) == (0, 0, 0, 0.999)
    assert (run.name, run.schedule.kind, run.data.seq_len) == (objective, "cosine", 1024)
    if objective == "reward":
        assert run.model.score
        with pytest.raises(UserError, match=r"lora.rank = 8 with train.objective = \"reward\""):
            run_of(train__objective=objective, lora__rank=8)
        return
    beside = run_of(train__objective=objective, lora__rank=8)
    assert beside.optimizer.lr == pytest.approx(10 * usual.lr)


def test_nothing_of_the_demo_is_left_beside_conversations() -> None:
    run, plain = run_of(train__objective="sft"), RunConfig()
    assert run.data.prepare.max_text_bytes is None and run.evaluate == plain.evaluate
    assert (run.train.global_batch, run.launch.processes) == (16, 0)
    assert load(overrides={"train.objective": "pretrain"}) == load()


def test_nothing_of_the_demo_s_text_is_left_beside_other_text() -> None:
    assert run_of().data.prepare.max_text_bytes is None
    prepare = load(overrides={"data.sources": {"/p": 1.0}}).data.prepare
    assert prepare == RunConfig().data.prepare.model_copy(update={"out": prepare.out})


def test_what_the_user_says_stays(tmp_path: Path) -> None:
    run = run_of(train__objective="dpo", optimizer__lr=1e-4, train__steps=7, data__seq_len=256, name="mine")
    assert (run.optimizer.lr, run.train.steps, run.train.epochs, run.data.seq_len) == (1e-4, 7, 0, 256)
    assert (run.name, run.schedule.warmup_fraction) == ("mine", 0.1)
    timed = run_of(train__objective="sft", train__minutes=2.0)
    assert (timed.train.minutes, timed.train.epochs, timed.schedule.warmup_of(None)) == (2, 0, 20)
    assert run_of(train__objective="sft", schedule__warmup_steps=5).schedule.warmup_of(100) == 5
    (tmp_path / "run.toml").write_text('optimizer.lr = 3e-4\n[train]\nobjective = "sft"\nglobal_batch = 4\n')
    file = load(tmp_path / "run.toml")
    assert (file.optimizer.lr, file.train.global_batch, file.train.epochs) == (3e-4, 4, 3)
    assert file.schedule.warmup_of(200) == 6


def test_an_adapter_of_text_has_the_rate_of_its_paper() -> None:
    run = load(overrides={"lora.rank": 8, "model.preset": "llama-5m"})
    assert (run.optimizer.lr, run.optimizer.weight_decay, run.train.minutes) == (2e-4, 0, load().train.minutes)
    assert load(overrides={"lora.rank": 0}).optimizer.lr == load().optimizer.lr


def test_rows_are_no_longer_than_the_model_s_context() -> None:
    assert run_of(train__objective="sft", model__max_seq_len=512).data.seq_len == 512


def test_a_share_of_an_unknown_length_is_refused() -> None:
    with pytest.raises(UserError, match=r"schedule.warmup_fraction = 0.1 with train.minutes"):
        load(overrides={"schedule.warmup_fraction": 0.1})


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"model.preset": "llama-5m"}, "llama-5m"),
        ({"model.preset": "llama-5m", "model.vocab_size": 99, "model.max_seq_len": 64}, "llama-5m"),
        ({"model.preset": "llama-5m", "model.width": 64}, "llama-5m with other sizes"),
        ({"model.preset": "llama-5m", "model.moe.experts": 4}, "llama-5m with other sizes"),
    ],
)
def test_a_preset_gives_its_name_to_a_model_of_its_sizes(keys, name):
    assert model_name(load("demo", {"data.seq_len": 32} | keys).model) == name


def test_a_model_without_a_preset_is_called_otherwise_or_by_its_family():
    model = load("parity").model
    assert model.preset is None
    assert (model_name(model), model_name(model, "mine")) == (model.family, "mine")
