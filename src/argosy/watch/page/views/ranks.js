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
  const map = new HeatMap({ label: "Ranks by step; arrow keys go from cell to cell", describe: (row, column) => describe(answer, medians, row, column), select: (first, last) => zoomRows(answer, first, last), height: 420 });
  const key = h("select", { id: "ranks-key", onchange: () => state.set({ key: key.value === "own" ? undefined : key.value }) });
  const back = h("button", { type: "button", class: "quiet", onclick: () => state.set({ rank_from: undefined, rank_to: undefined }) }, "All ranks");
  const steps = h("button", { type: "button", class: "quiet", onclick: page.all }, "All steps");
  const size = h("span", { class: "muted" });
  const found = h("div", {});
  const legend = h("div", {});
  const empty = h("div", {});
  const body = h("div", { class: "stack-of-cards" }, h("div", { class: "tools-bar" }, h("label", { for: "ranks-key" }, "Shown"), key, size, back, steps), h("section", { class: "card" }, legend, map.element), found);
  replace(root, body, empty);

  async function refresh(signal) {
    const { key: wanted, rank_from, rank_to } = state.get();
    const columns = Math.max(40, Math.min(400, Math.round(root.clientWidth / 4)));
    answer = await ofRun(page.primary(), "ranks", { key: wanted ?? "own", points: columns, rows: 256, rank_from, rank_to, ...page.range() }, signal);
    const none = !answer.values?.length || !answer.step?.length;
    const told = [...(answer.stragglers ?? []), ...(answer.links ?? []), ...(answer.deaths ?? [])].length;
    body.hidden = none && !told;
    replace(empty, none ? nothing("No figures of ranks in this range.", "Each node writes down what its ranks did every few seconds (observe.ranks_every_s); short or older runs have none.") : null);
    if (!none) draw(wanted ?? "own", rank_from !== undefined);
    replace(found, findings(answer));
  }

  function draw(shown, zoomed) {
    const keys = answer.keys?.length ? answer.keys : [shown];
    if (key.dataset.keys !== keys.join()) {
      key.dataset.keys = keys.join();
      replace(key, keys.map((each) => h("option", { value: each }, TITLES[each] ?? words(each.replace(/^seconds\./, "")))));
    }
    key.value = shown;
    const of = answer.world ?? answer.values.length;
    const each = answer.values.length < of && !zoomed ? `, the slowest of every ${grouped(Math.ceil(of / answer.values.length))} a row; press a row, or drag over several, to see closer` : "";
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
    replace(legend, rampLegend("relative", `${BELOW} ×`, `the median ${relative ? "of the step" : "of this rank"}, ${format(middle)} typically`, `${ABOVE} ×`));
  }

  return { refresh, recolour: () => map.draw(), destroy: () => map.destroy() };
}

// Half the median to twice the median, on a scale of ratios: the median lies in the middle.
function shareOf(value, middle) {
  if (!(value > 0) || !(middle > 0)) return 0;
  return Math.log(value / middle / BELOW) / Math.log(ABOVE / BELOW);
}

const rankText = (rank) => (Array.isArray(rank) ? (rank[0] === rank[1] ? grouped(rank[0]) : `${rank[0]}–${rank[1]}`) : grouped(rank));

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

function marksOf(answer) {
  const rowOf = (rank) => answer.ranks.findIndex((each) => covers(each, rank));
  const columnOf = (step) => {
    if (step === null || step === undefined) return null;
    const at = answer.step.findIndex((each) => each >= step);
    return at < 0 ? answer.step.length - 1 : at;
  };
  const marks = (list, colour) => list.flatMap((each) => (each.ranks ?? [each.rank]).map((rank) => ({ row: rowOf(rank), from: columnOf(each.step), to: each.last_step === undefined || each.last_step === null ? answer.step.length - 1 : columnOf(each.last_step), colour })));
  const deaths = (answer.deaths ?? []).map((each) => ({ row: rowOf(each.rank), from: columnOf(each.step), to: columnOf(each.step), colour: "ink" }));
  return [...marks(answer.stragglers ?? [], "bad"), ...marks(answer.links ?? [], "warn"), ...deaths].filter((mark) => mark.row >= 0);
}

function findings(answer) {
  const item = (kind, each, tone) => {
    const ranks = each.ranks ?? [each.rank];
    const where = each.node ?? each.nodes?.join(", ");
    const since = each.step === undefined || each.step === null ? "" : `, ${kind === "died" ? "at" : "since"} step ${grouped(each.step)}`;
    return h("li", {}, h("b", { class: tone }, kind), h("span", {}, `rank${ranks.length > 1 ? "s" : ""} ${ranks.map(rankText).join(" and ")}${where ? ` on ${where}` : ""}${since}`), h("span", { class: "why" }, each.why ?? ""));
  };
  const items = [
    ...(answer.stragglers ?? []).map((each) => item("straggler", each, "bad")),
    ...(answer.links ?? []).map((each) => item("slow link", each, "warn")),
    ...(answer.deaths ?? []).map((each) => item("died", each, "bad")),
  ];
  if (!items.length) return h("p", { class: "muted" }, "No straggler, no slow link, and no rank died.");
  return card("What stands out", h("ul", { class: "findings" }, items));
}

export default { name: "ranks", title: "Ranks", create };
