"""What is new in a run's folder."""

from __future__ import annotations

import json

from argosy.sinks.worker import LINES_AT_ONCE, MOST_FOLLOWED, Feed, NewRows
from run_folder import RunFolder


def steps(news: NewRows) -> list[int]:
    return [record["step"] for record in news.metrics if "loss" in record]


def test_each_line_is_told_once(tmp_path):
    run = RunFolder(tmp_path)
    feed = Feed(tmp_path, {})
    assert feed.take() == NewRows()
    run.step(0)
    run.evaluation(1, 3.0)
    run.step(1)
    run.event("save", step=2)
    run.sample(1, "upon")
    news = feed.take()
    assert steps(news) == [0, 1]
    assert news.rewound_to is None
    assert [record.get("validation_loss") for record in news.metrics] == [None, 3.0, None]
    assert [(record["process"], record["event"]) for record in news.events] == [("rank-0", "save")]
    assert [record["text"] for record in news.samples] == ["upon"]
    assert feed.take() == NewRows()


def test_lines_that_are_forgotten_are_taken_back_and_told_again(tmp_path):
    run = RunFolder(tmp_path)
    feed = Feed(tmp_path, {})
    run.step(*range(10))
    feed.take()
    run.lose_from(6)
    assert feed.take().rewound_to == 6
    run.step(6, 7)
    news = feed.take()
    assert (news.rewound_to, steps(news)) == (None, [6, 7])
    run.lose_from(5)
    run.step(5, loss=9.0)
    news = feed.take()
    assert (news.rewound_to, steps(news)) == (5, [5])
    run.lose_from(0)
    assert feed.take().rewound_to == 0


def test_a_step_stays_whose_evaluation_is_done_again(tmp_path):
    run = RunFolder(tmp_path)
    feed = Feed(tmp_path, {})
    run.step(*range(10))
    feed.take()
    run.lose_from(5)
    run.evaluation(4, 3.0)
    run.step(5, 6, 7)
    news = feed.take()
    assert (news.rewound_to, steps(news)) == (5, [5, 6, 7])


def test_steps_stay_before_an_evaluation_that_came_late(tmp_path):
    run = RunFolder(tmp_path)
    feed = Feed(tmp_path, {})
    run.step(*range(8))
    run.evaluation(5, 3.0)  # parameter servers hear of it updates later
    run.step(8)
    feed.take()
    run.lose_from(8)
    news = feed.take()
    assert (news.rewound_to, news.metrics) == (8, [])


def test_another_process_goes_on_where_the_last_one_was(tmp_path):
    run = RunFolder(tmp_path)
    first = Feed(tmp_path, {})
    run.step(*range(5))
    run.event("start")
    first.take()
    marks = json.loads(json.dumps(first.marks()))
    run.lose_from(3)
    run.step(3, loss=9.0)
    news = Feed(tmp_path, marks).take()
    assert (news.rewound_to, steps(news), news.events) == (3, [3], [])


def test_a_long_file_is_told_in_parts(tmp_path):
    run = RunFolder(tmp_path)
    run.step(*range(LINES_AT_ONCE + 10))
    feed = Feed(tmp_path, {})
    first, second = feed.take(), feed.take()
    assert (len(first.metrics), first.is_more) == (LINES_AT_ONCE, True)
    assert (len(second.metrics), second.is_more) == (10, False)


def test_a_large_run_is_followed_by_the_events_of_few_processes(tmp_path):
    run = RunFolder(tmp_path)
    run.event("start")
    for rank in range(1, MOST_FOLLOWED + 1):
        (tmp_path / f"events/rank-{rank}.jsonl").write_text('{"time_s": 1.0, "event": "start"}\n')
    (tmp_path / "events/launcher.jsonl").write_text('{"time_s": 0.0, "event": "worker_started"}\n')
    assert [record["event"] for record in Feed(tmp_path, {}).take().events] == ["worker_started", "start"]
