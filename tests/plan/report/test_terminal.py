"""The planner's report on a screen: a plan can be copied from it, however narrow it is."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from argosy.plan.plan import Plan
from argosy.plan.report.report import PlanReport, plan_report
from argosy.plan.report.request import Question, of_model
from argosy.plan.report.terminal import figures_table, show


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan_report(of_model("llama3-8b", "8xh100", Question()))


def shown(report: PlanReport, width: int) -> list[str]:
    out = StringIO()
    show(report, Console(file=out, width=width, force_terminal=True, color_system=None))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_each_plan_stands_whole_in_a_line(report, width):
    lines = shown(report, width)
    assert len(report.choices) > 3
    for choice in report.choices:
        line = next(line for line in lines if line.rstrip().endswith(f" {choice.plan}"))
        assert Plan.parse(line.split()[-1]) == Plan.parse(choice.plan)
    assert f'"{report.explanation.choice.plan}"' in lines


def test_the_figures_of_a_plan_that_does_not_fit_beside_them_have_its_number(report):
    lines = shown(report, 80)
    plans = [line.split()[1] for line in lines if line.startswith(" 1  ")]
    assert plans[0] == report.choices[0].plan
    assert all(len(line) <= 80 for line in lines if "microbatch=" not in line)


def test_a_table_that_is_too_wide_loses_no_figure():
    table, out = figures_table("run", "cost"), StringIO()
    table.add_row("28.8 days (19.2 days to 43.3 days)", "81.7k (46.4k to 159k) USD")
    Console(file=out, width=40).print(table)
    assert {"43.3", "159k)", "USD"} <= set(out.getvalue().split())


def test_a_notebook_shows_the_report_as_a_table_of_plans(report):
    page = report._repr_html_()
    assert page.count("<tr>") == 1 + len(report.choices)
    assert all(choice.plan in page for choice in report.choices)
