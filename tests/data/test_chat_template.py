from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from argosy.data.chat_encoder import ChatEncoder
from argosy.data.chat_template import CHATML, REFUSED_BY_TEMPLATE, UNSHOWN_ANSWERS, ChatTemplate
from argosy.data.conversations import BadRecord, Conversation, conversations_of
from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.packing import ID_MASK, START_BIT, TRAINED
from argosy.data.stores.model_folder import TOOLS_TEMPLATE
from argosy.data.tokenizer import END_OF_DOCUMENT, usage_of
from argosy.errors import UserError

MARK, UNMARK = "{% generation %}", "{% endgeneration %}"
PLAIN_CHATML = CHATML.replace(MARK, "").replace(UNMARK, "")
LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- else %}{{- raise_exception('only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""
FORGETFUL = """\
{%- for message in messages %}
    {{- message['role'] + ': ' + ('<think></think>' if loop.last and message['role'] == 'assistant' else '') }}
    {{- message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|end|>", "<|user|>", "<|observation|>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Add. "},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2+2, naïve one?"},
    {"role": "assistant", "content": "It is 4 — fünf minus 1."},
]


def answers(text: str, messages: list[dict[str, Any]]) -> tuple[str, list[str]]:
    template = ChatTemplate(text, SPECIAL, "chat_template.jinja")
    found = template.conversation(Conversation(messages), ENDS)
    return found.text, [found.text[begin:end] for begin, end in found.answers]


@pytest.mark.parametrize(
    ("template", "end", "messages"),
    [
        (CHATML, "<|im_end|>", TALK),
        (PLAIN_CHATML, "<|im_end|>", TALK),
        (LLAMA_3, "<|eot_id|>", TALK),
        (MISTRAL, "</s>", TALK[1:]),
        (GEMMA, "<end_of_turn>", TALK),
    ],
    ids=["marked", "chatml", "llama 3", "mistral", "gemma"],
)
def test_answers_are_found_with_the_end_of_their_turn(template: str, end: str, messages: list[dict[str, Any]]) -> None:
    text, found = answers(template, messages)
    assert [answer.strip() for answer in found] == ["It is 2." + end, "It is 4 — fünf minus 1." + end]
    assert text.count("What is 1+1?") == 1


def test_text_and_masks_are_those_of_transformers(tokenizer_json: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    engine = Engine.from_file(str(tokenizer_json))
    engine.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    engine.save(str(tmp_path / TOKENIZER))
    marked = CHATML.replace("'assistant' -%}\n", "'assistant' -%}\n{{- '' -}}")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / TOKENIZER))
    expected = theirs.apply_chat_template(
        TALK, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    found = ChatTemplate(marked, {}, "template").conversation(Conversation(TALK))
    assert found.text == theirs.apply_chat_template(TALK, chat_template=marked, tokenize=False)
    part = {"text": found.text, "answers": found.answers, "cuts": [], "marks": 0}
    words = ChatEncoder(tmp_path / TOKENIZER, 1000, 0.0).encode([json.dumps([part])]).tokens
    assert (words & ID_MASK).tolist() == expected["input_ids"]
    assert (words & TRAINED != 0).astype(int).tolist() == expected["assistant_masks"]
    assert (words & START_BIT != 0).nonzero()[0].tolist() == [0]


@pytest.mark.parametrize("text", [LLAMA_3, GEMMA, PLAIN_CHATML], ids=["llama 3", "gemma", "chatml"])
def test_templates_are_rendered_as_by_transformers(text: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(text, SPECIAL, "template")
    for some in (TALK, TALK[:2]):
        (theirs,), _ = utils.render_jinja_template([some], chat_template=text, add_generation_prompt=True, **SPECIAL)
        assert template.render(some, opens_answer=True) == theirs


def test_tools_reach_the_template() -> None:
    text = "{{ tools | tojson }}" + CHATML.replace(
        "message['content']", "(message['content'] or message['tool_calls'] | tojson)"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    tools = [{"type": "function", "function": {"name": "add"}}]
    record = {"messages": [TALK[1], call, {"role": "tool", "content": "2"}, TALK[2]], "tools": tools}
    (conversation,) = conversations_of(record, "sft")
    found = ChatTemplate(text, {}, "template").conversation(conversation)
    first, second = (found.text[begin:end] for begin, end in found.answers)
    assert json.loads(first.removesuffix("<|im_end|>")) == call["tool_calls"]
    assert second == "It is 2.<|im_end|>"
    assert found.text.startswith(json.dumps(tools))


@pytest.mark.parametrize(
    ("said", "shown"),
    [("message.tool_calls[0].function | tojson", '{"name": "add", "arguments": {"a": 1}}'),
     ("'add ' + message.tool_calls[0].function.arguments", 'add {"a":1}')],
)  # fmt: skip
def test_arguments_of_calls_may_be_json_as_in_openais_api(said: str, shown: str) -> None:
    text = CHATML.replace("message['content'] + '<|im_end|>'", f"({said})")
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": '{"a":1}'}}]}
    (answer,) = answers(text, [call])[1]
    assert answer.strip() == shown


@pytest.mark.parametrize(
    ("text", "messages", "kind"),
    [
        (
            FORGETFUL.replace("message['content'] +", "(message['content'] if loop.last else '') +"),
            TALK,
            UNSHOWN_ANSWERS,
        ),
        ("{% for m in messages %}{{ m['content'][:3] }}{% endfor %}", TALK, UNSHOWN_ANSWERS),
        (CHATML.replace(UNMARK, "").replace(MARK, MARK + UNMARK), TALK, UNSHOWN_ANSWERS),
        (CHATML, [TALK[1], {**TALK[2], "tool_calls": [{"function": {"name": "add"}}]}], UNSHOWN_ANSWERS),
        (MISTRAL, TALK, REFUSED_BY_TEMPLATE),
        ("{{ messages[0].nothing.more }}", TALK, REFUSED_BY_TEMPLATE),
        ("{{ ''.__class__.__mro__ }}", TALK, REFUSED_BY_TEMPLATE),
        ("{{ messages.append(1) }}", TALK, REFUSED_BY_TEMPLATE),
    ],
)
def test_what_is_not_found_is_refused(text: str, messages: list[dict[str, Any]], kind: str) -> None:
    with pytest.raises(BadRecord) as bad:
        answers(text, messages)
    assert bad.value.kind == kind


PHI_3 = """{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""


def test_what_ends_the_whole_text_may_follow_the_last_answer_alone() -> None:
    text, found = answers(PHI_3, TALK)
    assert [answer.strip() for answer in found] == ["It is 2.<|end|>", "It is 4 — fünf minus 1.<|end|>\n</s>"]
    cuts = ChatTemplate(PHI_3, SPECIAL, "").conversation(Conversation(TALK), ENDS).cuts
    assert cuts == [text.index("<|end|>\n<|user|>\nAnd") + len("<|end|>"), len(text)]


def test_an_answer_is_learned_as_it_is_written_when_it_is_the_last() -> None:
    text, found = answers(FORGETFUL, TALK)
    assert found == ["<think></think>It is 2.<|im_end|>", "<think></think>It is 4 — fünf minus 1.<|im_end|>"]
    template = ChatTemplate(FORGETFUL, {}, "")
    shown = template.render(TALK)
    assert text == shown.replace("It is 2.", "<think></think>It is 2.")
    pair = template.conversation(Conversation(TALK, prompt=4), ENDS)  # what is only read stays as the template has it
    assert (pair.text, len(pair.answers), pair.cuts) == (shown, 1, [len(shown)])


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
REASONED = {**TALK[2], "content": "<think>\n1, 2\n</think>\n\nIt is 2."}
REASONS = [TALK[1], REASONED, TALK[3], {**TALK[4], "reasoning": "1, 2"}]
CALLS = [*TALK[:2], CALL, {"role": "tool", "content": "2"}, *TALK[2:4], CALL, {"role": "tool", "content": "4"}, TALK[4]]


@pytest.mark.parametrize(
    ("name", "opened", "several"),
    [
        ("qwen3", "", (TALK, REASONS, CALLS)),
        ("qwen3_5_think", "<think>\n", (TALK, REASONS, CALLS)),
        ("qwen3_5_nothink", "<think>\n\n</think>\n\n", (TALK, CALLS)),
        ("deepseek_r1_distill", "<think>\n", (TALK, REASONS)),
        ("glm4moe", "", (TALK, [TALK[1], REASONED], CALLS)),
    ],
    ids=["qwen3", "qwen3.5", "qwen3.5 without reasoning", "r1", "glm"],
)
def test_answers_are_those_of_the_templates_that_trl_has_for_training(
    name: str, opened: str, several: tuple[list[dict[str, Any]], ...]
) -> None:
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("trl brings the templates")
    folder = Path(trl.origin).parent / "chat_templates"
    ours, theirs = (ChatTemplate((folder / f"{n}.jinja").read_text(), SPECIAL, n) for n in (name, f"{name}_training"))
    for messages in several:
        (said,) = conversations_of({"messages": messages, "tools": [{"function": {"name": "add"}}]}, "sft")
        found, expected = ours.conversation(said, ENDS), theirs.conversation(said)
        assert found.text == expected.text
        parts = [expected.text[begin:end].removeprefix("<｜Assistant｜>") for begin, end in expected.answers]
        assert [found.text[begin:end] for begin, end in found.answers] == [
            part.removeprefix(opened).rstrip("\n")  # what the prompt opens is given, and needs no learning
            for part in parts
        ]


def test_an_answer_may_end_with_what_begins_the_next_message() -> None:
    text = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    written, found = answers(text, TALK)
    assert found == ["\nIt is 2.<|user|>", "\nIt is 4 — fünf minus 1.<|user|>"]
    assert written == ChatTemplate(text, {}, "").render(TALK) + "<|user|>"
    assert ChatTemplate(text, {}, "").turn_end(ENDS) == "<|user|>"
    ended = ChatTemplate(text.replace("m.content }}", "m.content + 'END\\n' }}"), {}, "")
    shown = ended.conversation(Conversation(TALK[1:3]), [*ENDS, "END"])
    assert shown.text == ended.render(TALK[1:3])


def test_a_message_may_be_marked_in_parts() -> None:
    parts = CHATML.replace("message['content'] + '<|im_end|>' }}" + UNMARK, "message['content'] }}" + UNMARK)
    parts = parts.replace("{{ '\\n' }}", MARK + "{{ '<|im_end|>' }}" + UNMARK + "{{ '\\n' }}")
    assert answers(parts, TALK)[1] == ["It is 2.", "<|im_end|>", "It is 4 — fünf minus 1.", "<|im_end|>"]
    second = [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    assert answers(parts, second)[1] == ["It is 4 — fünf minus 1.", "<|im_end|>"]


def test_reasoning_may_be_left_out_by_the_template() -> None:
    short = CHATML.replace(
        "message['content'] + '<|im_end|>'", "message['content'].split('</think>')[-1] + '<|im_end|>'"
    )
    said = {"role": "assistant", "content": "<think>1, 2</think>\n\nIt is 2."}
    assert answers(short, [TALK[1], said])[1] == ["\n\nIt is 2.<|im_end|>"]


def test_answers_with_weight_0_are_read_and_not_learned() -> None:
    _, found = answers(CHATML, [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]])
    assert found == ["It is 4 — fünf minus 1.<|im_end|>"]


def test_a_template_is_found_beside_the_tokenizer(tokenizer_json: Path, tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_bytes(tokenizer_json.read_bytes())
    with pytest.raises(UserError, match=r"has no chat template.*Give `chat_template`: a jinja file, or chatml"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "own.jinja").write_text("{{ eos_token }}")
    assert ChatTemplate.load(tmp_path, str(tmp_path / "own.jinja")).render(TALK) == END_OF_DOCUMENT
    several = [{"name": "tool_use", "template": "{{ tools | length }}"}, {"name": "default", "template": "plain\n"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    found = ChatTemplate.load(tmp_path)
    assert (found.render(TALK), found.render(TALK, [{}, {}])) == ("plain", "2")
    settings = {"chat_template": LLAMA_3, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate.load(tmp_path).render(TALK).startswith("<s><|start_header_id|>system")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert ChatTemplate.load(tmp_path / TOKENIZER).render(TALK) == "</s>"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / TOOLS_TEMPLATE).write_text("{{ tools | length }}\n")
    found = ChatTemplate.load(tmp_path)
    assert (found.render(TALK), found.render(TALK, [{}, {}])) == ("</s>", "2")
    assert usage_of(tmp_path)[TEMPLATE].decode() == found.text  # which goes with the model from then on
    assert ChatTemplate.load(tmp_path, "chatml").text == CHATML
    with pytest.raises(UserError, match="no such file"):
        ChatTemplate.load(tmp_path, "missing.jinja")
    for text in ("{% if %}", "{% break %}", "{{ " + "(" * 5000):
        (tmp_path / "chat_template.jinja").write_text(text)
        with pytest.raises(UserError, match="not a chat template"):
            ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ range(10 ** 9) }}", "{{ '{}'.format() }}", "{{ 'a'.encode('x') }}", "{{ 10.0 ** 400 }}"]
)
def test_what_a_template_computes_wrong_refuses_the_conversation(text: str) -> None:
    with pytest.raises(BadRecord, match="the chat template: "):
        ChatTemplate(text, SPECIAL, "chat_template.jinja").render(TALK)
