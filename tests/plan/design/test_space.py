"""What no device can be is refused with file, line, key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plan.design.conftest import SERVE, TRAIN, Load

from argosy.errors import UserError
from argosy.plan.design.points import Points
from argosy.plan.design.space import DesignSpace

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("design*.toml"))
HBM = {"memory": '["HBM3", "HBM4"]', "stacks": "[5, 8]"}


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (
            {"base": '"v100"', "bf16_flops_per_s": "1e14"},
            r":3: device\.bf16_flops_per_s = 1e\+14: V100.* has no bf16 matmuls\. Leave it out, or give a base",
        ),
        ({"power_w": "[0.7]"}, r":3: device\.power_w = 0\.7 lies outside .* Give watts"),
        ({"bf16_flops_per_s": "[989]"}, r":3: device\.bf16_flops_per_s = 989 lies outside .* Give FLOP/s"),
        ({"link_bytes_per_s": "[3600e9]"}, r":3: device\.link_bytes_per_s = 3\.6e\+12 is 107 % of the memory's"),
        ({"memory_bytes_per_s": "8e13", **HBM}, r":3: device\.memory_bytes_per_s = 8e\+13 is 488 % of what 8 stacks"),
        ({"node": '"N5"', "die_area_mm2": "1600"}, r":4: device\.die_area_mm2 = 1600 lies outside .* takes more dies"),
        ({"node": '"N6"'}, r":3: device\.node: 'N6' is not known; there are N16, N12"),
        ({"memory": '"HBM3"'}, r":3: device\.memory needs stacks"),
        ({"dies": "2"}, r":3: device\.dies says nothing without a logic node"),
        ({"node": '"N5"', "bf16_flops_per_s": "1e15"}, r":4: device\.bf16_flops_per_s says what node does too"),
        ({"node": '"A14"'}, r"costs\.wafer_usd lacks A14: nobody published .* Add costs\.wafer_usd\.A14"),
        ({"base": '"b200"', "node": '"N5"'}, r":3: device\.node needs a base whose die area.*B200 has no"),
        ({"base": '"h1000"'}, r":2: device\.base: no device is called 'h1000'; did you mean h100"),
        ({"powr_w": "700"}, r":3: device\.powr_w = 700: unknown key; did you mean device\.power_w"),
        ({"nic_bytes_per_s": "[]"}, r":3: device\.nic_bytes_per_s: the list is empty\. Give at least one value"),
        ({"bf16_flops_per_s": "9.89e17"}, r":3: device\.bf16_flops_per_s = 9\.89e\+17 at power_w = 700 are"),
        ({"power_w": "[100]", "bf16_flops_per_s": "[2e17]"}, r":4: device\.bf16_flops_per_s = 2e\+17 at power_w = 100"),
    ],
)
def test_an_impossible_or_missing_figure_is_named(load: Load, figures: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=rf"space\.toml{message}" if message[0] == ":" else message):
        load(**figures)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("", r"device has no work to do\. Add \[train\], \[serve\] or both"),
        (TRAIN.replace("devices = 64\n", ""), r"train\.devices is missing"),
        (SERVE + 'weights = ["fp7"]', r"serve\.weights = 'fp7' is not known\. Try fp32"),
        (TRAIN + "precision = []", r"train\.precision: the list is empty\. Give at least one value"),
        (TRAIN + '[speedup]\nbefore = "a100"\nafter = "a100"', r"speedup\.after = 'a100' is the device before"),
        (
            SERVE + 'weights = ["int4"]\n[speedup]\nbefore = "a100"\nafter = "h100"',
            r"serve\.weights = 'int4': a speed-up is told for matmuls in bf16, fp8 and fp4",
        ),
    ],
)
def test_work_that_cannot_be_done_is_named(load: Load, work: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(work)


def test_too_many_points_are_refused(load: Load) -> None:
    many = str(list(range(100, 1700)))
    with pytest.raises(UserError, match=r"device has 2,560,000 points, more than 2,000,000"):
        load(power_w=many, link_bytes_per_s=many.replace("1", "1e9+", 0).replace(",", "e9,").replace("]", "e9]"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_space(path: Path) -> None:
    assert len(Points.of(DesignSpace.load(path))) > 0


def test_the_large_example_has_more_than_a_hundred_thousand_devices() -> None:
    (path,) = [path for path in EXAMPLES if path.stem == "design"]
    assert len(Points.of(DesignSpace.load(path))) > 100_000


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.touch()
    with pytest.raises(UserError, match=r"space\.toml: has no keys\. Give it what it needs of name, device, train"):
        DesignSpace.load(path)
