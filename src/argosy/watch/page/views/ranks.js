// Ranks by step: who is slower than the others, since when, and between whom a link is slow.

import { ofRun } from "../api.js";
import { card, nothing } from "../bars.js";
import { median } from "../curves.js";
import { h, replace } from "../dom.js";
import { forKey, grouped, words } from "../format.js";
import { HeatMap, rampLegend } from "../heatmap.js";
import * as state from "../state.js";

const TITLES = { own: "own work", step_s: "whole step" };
const BELOW = 0.5; // of the median: where the ramp begins; it ends at ABOVE times the median
const ABOVE = 2;

function create(root, page) {
  let answer = null;
  let medians = [];
  const map = new HeatMap({
    label: "Ranks by step; arrow keys go from cell to cell",
    describe: (row, column) => describe(answer, medians, row, column),
    select: (first, last) => zoomRows(answer, first, last),
    height: 420,
  });
  const key = h("select", {
    id: "ranks-key",
    onchange: () => state.set({ key: key.value === "own" ? undefined : key.value }),
  });
  const back = h(
    "button",
    { type: "button", class: "quiet", onclick: () => state.set({ rank_from: undefined, rank_to: undefined }) },
    "All ranks",
  );
  const steps = h("button", { type: "button", class: "quiet", onclick: page.all }, "All steps");
  const size = h("span", { class: "muted" });
  const found = h("div", {});
  const legend = h("div", {});
  const empty = h("div", {});
  const body = h(
    "div",
    { class: "stack-of-cards" },
    h("div", { class: "tools-bar" }, h("label", { for: "ranks-key" }, "Shown"), key, size, back, steps),
    h("section", { class: "card" }, legend, map.element),
    found,
  );
  replace(root, body, empty);

  async function refresh(signal) {
    const { key: wanted, rank_from, rank_to } = state.get();
    const columns = Math.max(40, Math.min(400, Math.round(root.clientWidth / 4)));
    answer = await ofRun(
      page.primary(),
      "ranks",
      { key: wanted ?? "own", points: columns, rows: 256, rank_from, rank_to, ...page.range() },
      signal,
    );
    const none = !answer.values?.length || !answer.step?.length;
    const told = [...(answer.stragglers ?? []), ...(answer.links ?? []), ...(answer.deaths ?? [])].length;
    body.hidden = none && !told;
    replace(
      empty,
      none
        ? nothing(
            "No figures of ranks in this range.",
            "Each node writes down what its ranks did every few seconds (observe.ranks_every_s); short or older runs have none.",
          )
        : null,
    );
    if (!none) draw(wanted ?? "own", rank_from !== undefined);
    replace(found, findings(answer));
  }

  function draw(shown, zoomed) {
    // The newest line of a node may lack some.
    const keys = [...new Set(["own", "step_s", shown, ...(answer.keys ?? [])])];
    if (key.dataset.keys !== keys.join()) {
      key.dataset.keys = keys.join();
      replace(
        key,
        keys.map((each) => h("option", { value: each }, TITLES[each] ?? words(each.replace(/^seconds\./, "")))),
      );
    }
    key.value = shown;
    const of = answer.world ?? answer.values.length;
    const each =
      answer.values.length < of && !zoomed
        ? `, the slowest of every ${grouped(Math.ceil(of / answer.values.length))} a row; press a row, or drag over several, to see closer`
        : "";
    size.textContent = `${grouped(of)} ${of === 1 ? "rank" : "ranks"}${each}`;
    back.hidden = !zoomed;
    steps.hidden = !page.window();
    medians = answer.step.map((_, column) => median(answer.values.map((row) => row[column] ?? null)));
    const relative = answer.values.length > 1;
    const format = forKey(shown === "own" ? "step_s" : shown);
    const middle = median(medians);
    map.update({
      values: answer.values,
      ramp: "relative",
      share: (value, row, column) => shareOf(value, relative ? medians[column] : middle),
      rowNames: answer.ranks.map((rank) => String(Array.isArray(rank) ? rank[0] : rank)),
      columnNames: answer.step.map((step) => grouped(step)),
      marks: marksOf(answer),
    });
    replace(
      legend,
      rampLegend(
        "relative",
        `${BELOW} ×`,
        `the median ${relative ? "of the step" : "of this rank"}, ${format(middle)} typically`,
        `${ABOVE} ×`,
      ),
    );
  }

  return { refresh, recolour: () => map.draw(), destroy: () => map.destroy() };
}

// Half the median to twice the median, on a scale of ratios: the median lies in the middle.
function shareOf(value, middle) {
  if (!(value > 0) || !(middle > 0)) return 0;
  return Math.log(value / middle / BELOW) / Math.log(ABOVE / BELOW);
}

const rankText = (rank) =>
  Array.isArray(rank) ? (rank[0] === rank[1] ? grouped(rank[0]) : `${rank[0]}–${rank[1]}`) : grouped(rank);

const covers = (rank, wanted) => (Array.isArray(rank) ? wanted >= rank[0] && wanted <= rank[1] : rank === wanted);

function describe(answer, medians, row, column) {
  const value = answer.values[row]?.[column];
  const format = forKey(answer.key === "own" || !answer.key ? "step_s" : answer.key);
  const times = value && medians[column] ? `, ${(value / medians[column]).toFixed(2)} × the median` : "";
  const many = Array.isArray(answer.ranks[row]) && answer.ranks[row][0] !== answer.ranks[row][1];
  return [
    `${many ? "Ranks" : "Rank"} ${rankText(answer.ranks[row])}, step ${grouped(answer.step[column])}`,
    `on ${answer.nodes?.[row] ?? "an unknown node"}`,
    value === null || value === undefined ? "nothing was written down" : `${format(value)}${times}`,
  ];
}

function zoomRows(answer, first, last) {
  const low = answer.ranks[first];
  const high = answer.ranks[last];
  if (first === last && (!Array.isArray(low) || low[0] === low[1])) return; // it cannot be seen closer
  state.set({ rank_from: Array.isArray(low) ? low[0] : low, rank_to: Array.isArray(high) ? high[1] : high });
}

// A frame from the first time on, rather than one for each.
const firsts = (found) => grouping(found ?? []).map(([first]) => first);

function marksOf(answer) {
  const rowOf = (rank) => answer.ranks.findIndex((each) => covers(each, rank));
  const columnOf = (step) => {
    if (step === null || step === undefined) return null;
    const at = answer.step.findIndex((each) => each >= step);
    return at < 0 ? answer.step.length - 1 : at;
  };
  const end = answer.step.length - 1;
  const marks = (list, colour) =>
    list.flatMap((each) =>
      ranksOf(each).map((rank) => ({
        row: rowOf(rank),
        from: columnOf(each.step),
        to: columnOf(each.last_step) ?? end,
        colour,
      })),
    );
  const deaths = (answer.deaths ?? []).map((each) => ({
    row: rowOf(each.rank),
    from: columnOf(each.step),
    to: columnOf(each.step),
    colour: "ink",
  }));
  return [...marks(firsts(answer.stragglers), "bad"), ...marks(firsts(answer.links), "warn"), ...deaths].filter(
    (mark) => mark.row >= 0,
  );
}

/** What detectors and agents found. The same thing is often found again while it lasts: one line, with how often. */
function findings(answer) {
  const kinds = [
    ["straggler", answer.stragglers, "bad"],
    ["slow link", answer.links, "warn"],
    ["died", answer.deaths, "bad"],
  ];
  const items = kinds.flatMap(([kind, found, tone]) => grouping(found ?? []).map((same) => finding(kind, same, tone)));
  if (!items.length) return h("p", { class: "muted" }, "No straggler, no slow link, and no rank died.");
  return card("What stands out", h("ul", { class: "findings" }, items));
}

const ranksOf = (each) => (each.ranks ?? [each.rank]).filter((rank) => rank !== null && rank !== undefined);

function grouping(found) {
  const groups = new Map();
  for (const each of found) {
    const key = JSON.stringify([ranksOf(each), each.node]);
    groups.set(key, [...(groups.get(key) ?? []), each]);
  }
  return [...groups.values()];
}

function finding(kind, same, tone) {
  const [first] = same;
  const ranks = ranksOf(first);
  const who = ranks.length ? `rank${ranks.length > 1 ? "s" : ""} ${ranks.map(rankText).join(" and ")}` : "";
  const where = first.node ? `${who ? "on " : ""}${first.node}` : "";
  const known = first.step !== null && first.step !== undefined;
  const when = known ? `${kind === "died" ? "at" : "since"} step ${grouped(first.step)}` : "";
  const often = same.length > 1 ? `${same.length} times` : "";
  const place = [[who, where].filter(Boolean).join(" "), when, often].filter(Boolean).join(", ");
  return h(
    "li",
    {},
    h("b", { class: tone }, kind),
    h("span", {}, place),
    h("span", { class: "why" }, same.at(-1).why ?? ""),
  );
}

export default { name: "ranks", title: "Ranks", create };
