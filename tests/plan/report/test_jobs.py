"""A file of jobs: what is wrong with it is named, and what is right becomes a schedule with commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argosy.cli import main
from argosy.errors import UserError
from argosy.plan.report.jobs_file import JobsFile

EXAMPLE = Path(__file__).parents[3] / "examples" / "jobs.toml"
SMALL = """
[[clusters]]
name = "c"
cluster = "16xh100"
on = "{on}"

[[jobs]]
name = "first"
model = "llama-20m"
tokens = "20B"
global_batch = 512
deadline = "{deadline}"
late_per_day = 100

[[jobs]]
name = "second"
model = "llama-20m"
tokens = "1B"
global_batch = 512
after = ["first"]
most_devices = 8
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def answer(capsys, *argv: str):
    assert main(["plan", "--json", "--jobs", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_example_is_scheduled_and_drawn(capsys, tmp_path):
    """On clusters of fewer nodes, which have fewer plans."""
    text = EXAMPLE.read_text().replace('"64xh100"', '"16xh100"').replace('"32xa100"', '"16xa100"')
    (tmp_path / "jobs.toml").write_text(text)
    assert main(["plan", "--jobs", str(tmp_path / "jobs.toml"), "--html", str(tmp_path / "jobs.html")]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "jobs.html").read_text()
    for name in ("base", "long-context", "small", "ablation"):
        assert name in said and name in page and f"--name {name}" in said
    assert (
        "█" in said
        and "<svg" in page
        and "base: deadline +30.0 h" in page
        and "http" not in page.replace("http-equiv", "")
    )


def test_jobs_follow_each_other_and_say_what_lateness_costs(capsys, tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(SMALL.format(on="slurm", deadline="1m"))
    found = answer(capsys, str(path))
    first, second = found["jobs"]
    assert (first["name"], second["name"]) == ("first", "second")
    assert second["begin_s"] >= first["stints"][-1]["end_s"]
    assert all(stint["devices"] <= 8 for stint in second["stints"])
    assert first["in_time"] == 0 and first["late_cost"] == pytest.approx(found["late_cost"])
    assert first["late_cost"] == pytest.approx(first["late_s"] / 86_400 * 100, rel=0.2)
    (command,) = second["commands"]
    assert f"--extra=--begin=now+{second['begin_s']:.0f}" in command["lines"][-1]
    assert "--extra=--nice=1000" in command["lines"][-1] and "--nodes 1 --gpus-per-node 8" in command["lines"][-1]


def test_a_node_of_several_machines_is_launched_on_all_of_them(capsys, tmp_path):
    """Of an NVL72 domain 6 devices lie on two machines of 4."""
    path = tmp_path / "jobs.toml"
    text = SMALL.format(on="slurm", deadline="1d").replace("16xh100", "6xgb200").replace("512", "36")
    path.write_text(text.replace("most_devices = 8", "least_devices = 6"))
    (command,) = answer(capsys, str(path))["jobs"][1]["commands"]
    assert "--nodes 2 --gpus-per-node 3" in command["lines"][-1]


@pytest.mark.parametrize(
    ("on", "word"), [("kubernetes", "priorityclass argosy-1 --value=1000"), ("ray", "Ray knows no priorities")]
)
def test_each_scheduler_is_told_in_its_own_words(capsys, tmp_path, on, word):
    path = tmp_path / "jobs.toml"
    path.write_text(SMALL.format(on=on, deadline="30d"))
    found = answer(capsys, str(path))
    assert any(word in line for line in found["once"])
    assert all(f"--on {on}" in job["commands"][0]["lines"][-1] for job in found["jobs"])
    assert found["jobs"][0]["in_time"] == 1 and found["late_cost"] == 0


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'after = ["first"]',
            'after = ["frist"]',
            r'jobs.toml:20: jobs\[1\].after .* "frist"; there are first, second',
        ),
        ('deadline = "1d"', 'deadline = "soon"', r"jobs.toml:12: jobs\[0\].deadline: 'soon'.*90m, 12h, 30d"),
        ('model = "llama-20m"\ntokens = "1B"', 'tokens = "1B"', r'job "second": give either run or model'),
        ("most_devices = 8", "most_device = 8", r"most_device = 8: unknown key; did you mean most_devices"),
        ('name = "second"', 'name = "first"', r'jobs.toml:16: jobs\[1\].name = "first" is the name of two'),
        ('on = "slurm"', 'on = "pbs"', r"on = \"pbs\".*slurm"),
        ("late_per_day = 100", 'late_per_day = 100\nafter = ["second"]', r"jobs\[0\].after of job .* leads back to it"),
        ('deadline = "1d"\n', "", r'jobs.toml:\d+: jobs\[0\].late_per_day of job "first" needs a deadline'),
        ('tokens = "1B"', 'tokens = "many"', r"jobs.toml:18: jobs\[1\].tokens: 'many'.*30k"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path, old, new, message):
    path = tmp_path / "jobs.toml"
    text = SMALL.format(on="slurm", deadline="1d")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        JobsFile.load(path)


def test_a_job_that_fits_nowhere_says_why_on_each_cluster(capsys, tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(SMALL.format(on="slurm", deadline="1d").replace("most_devices = 8", "least_devices = 32"))
    assert main(["plan", "--jobs", str(path)]) == 2
    said = capsys.readouterr().err
    assert 'jobs.toml:21: jobs[1].least_devices = 32: job "second" runs on no cluster' in said
    assert "c: no plan on 32 or more of its 16 devices; there are plans for" in said


@pytest.mark.parametrize("named", ["", "/config.json"])
def test_a_model_s_folder_is_started_from_its_weights_or_not_at_all(capsys, tmp_path, named):
    (folder := tmp_path / "a model").mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "jobs.toml"
    path.write_text(SMALL.format(on="slurm", deadline="30d").replace("llama-20m", f"{folder}{named}", 1))
    (first, second), said = answer(capsys, str(path))["jobs"], f"{folder}{named} has no weights to start from"
    lines = first["commands"][0]["lines"]
    assert said in lines[-1] and all(line.startswith("#") for line in lines)
    assert "--model.preset llama-20m" in second["commands"][0]["lines"][-1]
    (folder / "model.safetensors").touch()
    lines = answer(capsys, str(path))["jobs"][0]["commands"][0]["lines"]
    assert lines[-1].startswith(f"argosy launch --model.weights '{folder}' --name first ")


def test_a_device_that_nobody_knows_is_named_with_its_line(capsys, tmp_path):
    path = tmp_path / "jobs.toml"
    path.write_text(SMALL.format(on="slurm", deadline="1d").replace("16xh100", "16xh1000"))
    assert main(["plan", "--jobs", str(path)]) == 2
    assert 'jobs.toml:4: clusters[0].cluster = "16xh1000": no device is called' in capsys.readouterr().err


def test_options_of_one_run_do_not_go_with_a_file_of_several(capsys):
    assert main(["plan", "--jobs", str(EXAMPLE), "--tokens", "1T"]) == 2
    assert "each with options of its own. Leave out --tokens" in capsys.readouterr().err
