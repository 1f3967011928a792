from __future__ import annotations

from typing import Any

import pytest

from argosy.data.conversations import (
    EQUAL_SIDES,
    IMAGES,
    NO_ANSWER,
    NO_CONVERSATION,
    ROLES,
    BadRecord,
    conversations_of,
)

USER, ANSWER = {"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
TOOL = {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER, USER]},  # what follows the last answer teaches nothing
        {"conversations": [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1+1=?"}]}, ANSWER]},
        {"messages": '[{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]'},
        {"prompt": "1+1=?", "completion": "2"},
        {"prompt": "1+1=?", "completion": "2", "messages": None},  # a table has a column for each form
        {"messages": [{"role": None, "from": "human", "content": None, "value": "1+1=?"}, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
        {"instruction": "1+1=?", "input": "", "output": "2", "history": None},
    ],
    ids=str,
)
def test_all_forms_are_the_same_conversation(record: dict[str, Any]) -> None:
    (found,) = conversations_of(record, "sft")
    assert found.messages == [USER, ANSWER]
    assert found.prompt == ("prompt" in record)


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("messages", [[USER, ANSWER], [SYSTEM, USER, ANSWER]])
def test_a_system_message_may_be_a_field(messages: list[dict[str, Any]]) -> None:
    record = {"system": SYSTEM["content"], "conversations": messages}
    assert conversations_of(record, "sft")[0].messages == [SYSTEM, USER, ANSWER]
    (judged,) = conversations_of({**record, "label": True}, "kto")
    assert (judged.messages, judged.prompt) == ([SYSTEM, USER, ANSWER], 2)
    assert conversations_of({**record, "system": " "}, "sft")[0].messages == messages


def test_calls_of_tools_are_answers() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    (found,) = conversations_of({"messages": [USER, CALL, TOOL, ANSWER], "tools": tools}, "sft")
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"] == CALL["tool_calls"]
    assert found.tools == tools


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        ({"text": "1+1=2"}, NO_CONVERSATION),
        ({"messages": []}, NO_CONVERSATION),
        ({"messages": "1+1=2"}, NO_CONVERSATION),
        ({"messages": ["1+1=2"]}, NO_CONVERSATION),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, NO_CONVERSATION),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, NO_CONVERSATION),
        ({"messages": [ANSWER, USER]}, ROLES),
        ({"messages": [USER, USER, ANSWER]}, ROLES),
        ({"messages": [USER, ANSWER, ANSWER]}, ROLES),
        ({"messages": [USER, {"role": "system", "content": "no"}, ANSWER]}, ROLES),
        ({"messages": [USER, TOOL, ANSWER]}, ROLES),
        ({"messages": [USER, {"role": "narrator", "content": "2"}]}, ROLES),
        ({"conversations": [USER, {"from": "function_call", "value": "add(1)"}]}, NO_CONVERSATION),
        ({"instruction": "1+1=?", "output": "2", "history": ["Hi"]}, NO_CONVERSATION),
        ({"instruction": "1+1=?", "output": "2", "history": 5}, NO_CONVERSATION),
        ({"instruction": {"a": 1}, "output": "2"}, NO_CONVERSATION),
        ({"instruction": "1+1=?", "output": ""}, NO_ANSWER),
        ({"messages": [USER]}, NO_ANSWER),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, NO_ANSWER),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, IMAGES),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, NO_CONVERSATION),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, NO_CONVERSATION),
    ],
    ids=str,
)
def test_wrong_records_are_told_apart(record: dict[str, Any], kind: str) -> None:
    with pytest.raises(BadRecord) as bad:
        conversations_of(record, "sft")
    assert bad.value.kind == kind


@pytest.mark.parametrize("said", [{"weight": 0}, {"train": False}, {"weight": 1, "training": False}], ids=str)
@pytest.mark.parametrize("answer", [ANSWER, {"from": "function_call", "value": '{"name": "add", "arguments": {}}'}])
def test_an_answer_may_be_one_that_is_not_learned(answer: dict[str, Any], said: dict[str, Any]) -> None:
    (found,) = conversations_of({"messages": [USER, {**answer, **said}, USER, {**ANSWER, "train": True}]}, "sft")
    assert [message.get("weight", 1) for message in found.messages] == [1, 0, 1, 1]


WRONG = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "1+1=?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        {
            "conversations": [{"from": "human", "value": "1+1=?"}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        {"instruction": "1+1=?", "input": "", "chosen": "2", "rejected": "3"},
        {"instruction": "1+1=?", "output": ["2", "3"]},
    ],
    ids=str,
)
def test_all_forms_are_the_same_pair(record: dict[str, Any]) -> None:
    chosen, rejected = conversations_of(record, "dpo")
    assert (chosen.messages, rejected.messages) == ([USER, ANSWER], [USER, WRONG])
    assert (chosen.prompt, rejected.prompt) == (1, 1)
    assert (chosen.is_rejected, rejected.is_rejected) == (False, True)


def test_alpacas_records_may_have_an_input_and_turns_before() -> None:
    record = {
        "instruction": "Add.",
        "input": "1+1=?",
        "history": [["Hi", "Hello"]],
        "output": "2",
        "system": "Be brief.",
    }
    (found,) = conversations_of(record, "sft")
    said = [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1+1=?"),
        ("assistant", "2"),
    ]
    assert [(message["role"], message["content"]) for message in found.messages] == said
    (judged,) = conversations_of({**record, "kto_tag": False}, "kto")
    assert (judged.prompt, judged.is_rejected) == (4, True)


def test_calls_may_be_messages_of_their_own_role() -> None:
    call = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    record = {"conversations": [USER, call, {"from": "observation", "value": "2"}, ANSWER]}
    (found,) = conversations_of(record, "sft")
    assert found.messages[1] == {**CALL, "content": "", "tool_calls": [{"type": "function", **CALL["tool_calls"][0]}]}


def test_a_pair_with_equal_sides_is_refused() -> None:
    with pytest.raises(BadRecord) as bad:
        conversations_of({"prompt": "1+1=?", "chosen": "2", "rejected": "2"}, "dpo")
    assert bad.value.kind == EQUAL_SIDES


@pytest.mark.parametrize("label", [True, False])
def test_a_judged_answer_has_its_label(label: bool) -> None:
    (found,) = conversations_of({"prompt": "1+1=?", "completion": "2", "label": label}, "kto")
    assert (found.prompt, found.is_rejected) == (1, not label)
