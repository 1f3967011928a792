"""How sites agree, chosen from the link between them: the most exact way that does not wait long."""

from __future__ import annotations

import pytest
from test_tiers import MBIT_S, run

from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig, check_fragments
from argosy.errors import UserError
from argosy.plan.cost.sites import rounds_of
from argosy.plan.hardware.clusters import Cluster, NodeGroup, SiteLink
from argosy.plan.hardware.devices import find_device
from argosy.plan.hardware.measurements import Measurements
from argosy.plan.search.agreement import CHOSEN, MOST_WAITING, SETTINGS, choose_rounds, inner_step


def cluster(rate: float) -> Cluster:
    groups = tuple(
        NodeGroup(device=find_device("cpu"), nodes=1, devices_per_node=1, site=name) for name in ("oslo", "lyon")
    )
    link = SiteLink(sites=("oslo", "lyon"), bandwidth_bytes_per_s=rate * MBIT_S, latency_s=0.01)
    return Cluster(name="oslo + lyon", groups=groups, links=(link,))


def of_two(plan: str = "auto,sync=auto", **sync: object) -> RunConfig:
    asked = run(batch=16, seq_len=512)
    places = tuple(SiteConfig(name=name) for name in ("oslo", "lyon"))
    return asked.model_copy(update={"plan": plan, "sites": places, "sync": asked.sync.model_copy(update=sync)})


@pytest.mark.parametrize("rate", [0.1, 1, 10, 100, 10_000])
def test_sites_wait_for_a_tenth_of_their_time_at_most_or_for_as_little_as_can_be(rate: float) -> None:
    asked, place = of_two(), cluster(rate)
    chosen = choose_rounds(asked, place, ())
    check_fragments(chosen.sync, asked.model.layers)
    costs, inner_s = inner_step(asked, place)
    told = rounds_of(costs.on(costs.run.model_copy(update={"sync": chosen.sync}), costs.devices), place, inner_s)
    assert told == chosen.rounds and inner_s == chosen.inner_step_s
    assert chosen.waiting <= MOST_WAITING or chosen.sync.every_steps == 500
    assert f"every_steps = {chosen.sync.every_steps}" in chosen.in_words()


def test_a_fast_link_gets_the_most_exact_rounds_and_thinner_ones_fewer_bytes() -> None:
    chosen = [choose_rounds(of_two(), cluster(rate), ()) for rate in (100_000, 100, 10, 1)]
    assert (chosen[0].sync.every_steps, chosen[0].sync.wire) == (10, "fp32")
    sent = [each.rounds.sent_bytes / each.rounds.steps for each in chosen]
    assert sent == sorted(sent, reverse=True) and sent[-1] < sent[0]


def test_keys_that_the_user_has_set_stay() -> None:
    chosen = choose_rounds(of_two(every_steps=30, wire="bf16"), cluster(1), ("every_steps", "wire"))
    assert (chosen.sync.every_steps, chosen.sync.wire) == (30, "bf16")
    streamed = choose_rounds(of_two(fragments=2), cluster(1), ("fragments",))
    assert streamed.sync.fragments == 2 and streamed.sync.overlap_steps > 0 and streamed.sync.mixing == 0.5


def test_what_is_no_setting_of_rounds_is_never_touched() -> None:
    before = of_two(outer_lr=0.9, outer_momentum=0.5)
    chosen = choose_rounds(before, cluster(10), ())
    others = {key for key in type(before.sync).model_fields if key not in CHOSEN}
    assert all(getattr(chosen.sync, key) == getattr(before.sync, key) for key in others)


def test_what_one_site_s_probe_found_does_not_decide() -> None:
    probed = cluster(10).model_copy(update={"measured": Measurements(host="oslo", layer_host_s=1.0)})
    assert choose_rounds(of_two(), probed, ()) == choose_rounds(of_two(), cluster(10), ())


def test_what_each_site_s_probe_found_gives_its_step_and_the_slowest_decides() -> None:
    def at(**host_s: float) -> Cluster:
        found = {name: Measurements(host=name, site=name, layer_host_s=each) for name, each in host_s.items()}
        return cluster(1).model_copy(update={"measured_at": found})

    of_sheet, slow = choose_rounds(of_two(), cluster(1), ()), choose_rounds(of_two(), at(oslo=1e-4, lyon=2.0), ())
    assert slow.inner_step_s > 2 * of_sheet.inner_step_s
    assert slow == choose_rounds(of_two(), at(oslo=2.0, lyon=1e-4), ())
    places = [SETTINGS.index((each.sync.every_steps, each.sync.fragments)) for each in (slow, of_sheet)]
    assert places == sorted(set(places)), "longer steps leave time for what loses less"


@pytest.mark.parametrize("place", [None, Cluster.parse("2xcpu"), Cluster.parse("two-sites")])
def test_a_link_that_nobody_described_is_refused_with_what_to_do(place: Cluster | None) -> None:
    from argosy.plan.search.agreement import check_sites_of

    with pytest.raises(UserError, match=r"oslo and lyon .*argosy probe --run RUN.toml --site NAME"):
        check_sites_of(of_two(), place)
