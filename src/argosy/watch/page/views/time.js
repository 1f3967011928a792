// Where the time goes: the parts of each step, and beside them what the plan said.

import { ofRun } from "../api.js";
import { card, nothing, partsLegend, stackBar, table } from "../bars.js";
import { Chart } from "../charts.js";
import { ofParts } from "../colours.js";
import { h, replace } from "../dom.js";
import { bytes, duration, number, percent, words } from "../format.js";

const NOT_PARTS = new Set(["step"]);
const ORDER = [
  "forward",
  "pipeline",
  "backward",
  "optimizer",
  "communication",
  "data",
  "check",
  "checkpoint",
  "evaluate",
  "other",
];

function create(root, page) {
  const chart = new Chart({
    title: "Seconds of each step",
    format: duration,
    height: 250,
    kind: "stack",
    zoom: page.zoom,
    reset: page.all,
  });
  const said = h("div", {});
  const beside = h("div", {});
  const traffic = h("div", {});
  const empty = h("div", {});
  const body = h(
    "div",
    { class: "stack-of-cards" },
    said,
    h("div", { class: "two wide-left" }, chart.element, beside),
    traffic,
  );
  replace(root, body, empty);

  async function refresh(signal) {
    const answer = await ofRun(
      page.primary(),
      "time",
      { points: Math.min(600, Math.round(root.clientWidth / 2)), ...page.range() },
      signal,
    );
    const none = !answer.step?.length;
    body.hidden = none;
    replace(
      empty,
      none
        ? nothing("No step has been made in this range.", "A run shows its first step when compiling has ended.")
        : null,
    );
    if (none) return;
    const names = sortedParts(Object.keys(answer.parts));
    const colours = ofParts(names);
    chart.update({
      series: names.map((name) => ({
        name: words(name),
        run: page.named(page.primary()),
        colour: colours.get(name),
        step: answer.step,
        mean: answer.parts[name],
      })),
      window: [answer.step[0], answer.step.at(-1)],
      marks: [],
    });
    replace(said, answer.words ? h("p", { class: "notice say" }, answer.words) : null);
    replace(beside, measuredAndPlanned(answer, names, colours));
    replace(traffic, trafficTable(answer.communication ?? []), syncCard(answer.sync ?? {}, answer.sites ?? []));
  }

  return { refresh, recolour: () => chart.recolour(), destroy: () => chart.destroy() };
}

function sortedParts(names) {
  const place = (name) => (ORDER.indexOf(name) + 1 || ORDER.length) - 1;
  return names.filter((name) => !NOT_PARTS.has(name)).sort((a, b) => place(a) - place(b));
}

const mean = (values) => {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : 0;
};

function measuredAndPlanned(answer, names, colours) {
  const typical = names
    .map((name) => ({ name: words(name), value: mean(answer.parts[name]), colour: colours.get(name) }))
    .filter((part) => part.value > 0);
  const planned = Object.entries(answer.predicted ?? {});
  const shades = ofParts(planned.map(([name]) => name));
  const plan = planned.map(([name, value]) => ({ name: words(name), value, colour: shades.get(name) }));
  const measured = answer.measured
    ? Object.entries(answer.measured).map(([name, value]) => ({
        name: words(name),
        value,
        colour: shades.get(name) ?? "part-rest",
      }))
    : typical;
  const sum = (parts) => parts.reduce((total, part) => total + (part.value ?? 0), 0);
  const scale = Math.max(sum(measured), sum(plan));
  if (!plan.length)
    return card(
      "A step",
      h("h4", {}, `measured, ${duration(sum(typical))}`),
      stackBar(typical, sum(typical), duration, { label: "Measured:" }),
      partsLegend(typical, duration),
      h("p", { class: "muted" }, "There is no prediction of these steps."),
    );
  const rows = plan.map((part, i) => {
    const got = measured.find((each) => each.name === part.name)?.value;
    const ratio = got !== undefined && part.value ? got / part.value : null;
    return [
      h(
        "span",
        { class: "run-name" },
        h("i", { class: "swatch square", style: { "--c": `var(--${shades.get(planned[i][0])})` } }),
        part.name,
      ),
      duration(part.value),
      duration(got),
      ratio === null ? "–" : h("span", { class: ratio > 1.5 || ratio < 0.67 ? "warn" : null }, `${ratio.toFixed(2)} ×`),
    ];
  });
  rows.push([
    h("b", {}, "step"),
    duration(sum(plan)),
    duration(sum(measured)),
    sum(plan) ? `${(sum(measured) / sum(plan)).toFixed(2)} ×` : "–",
  ]);
  return card(
    "A typical step beside the plan’s",
    h(
      "div",
      { class: "pair" },
      h("span", {}, "measured"),
      stackBar(measured, scale, duration, { label: "Measured:" }),
      h("span", {}, "plan"),
      stackBar(plan, scale, duration, { label: "Plan:" }),
    ),
    table(
      [
        { text: "Part" },
        { text: "Plan", number: true },
        { text: "Measured", number: true },
        { text: "Ratio", number: true },
      ],
      rows,
      { caption: "Parts of a step, predicted and measured" },
    ),
  );
}

function trafficTable(rows) {
  if (!rows.length)
    return card(
      "Communication",
      h(
        "p",
        { class: "muted" },
        "No communication by axis was written down: one process, or a run of an older version.",
      ),
    );
  const head = [
    { text: "Axis" },
    { text: "Tier" },
    ...["Waited, a step", "Sent, a step", "Rate", "Plan says"].map((text) => ({ text, number: true })),
  ];
  const cells = rows.map((row) => [
    row.axis,
    row.tier === "network" ? "between machines" : "inside a machine",
    duration(row.seconds),
    bytes(row.bytes),
    row.seconds > 0 ? `${bytes(row.bytes / row.seconds)}/s` : "–",
    row.predicted_bytes ? `${bytes(row.predicted_bytes)} (${percent(row.bytes / row.predicted_bytes)})` : "–",
  ]);
  return card(
    "Communication by axis and tier",
    table(head, cells, { caption: "Communication of the first rank by axis and tier, mean of the steps shown" }),
  );
}

// What replicas, or sites, send in place of exact sums: only runs that agree in fewer bytes have it.
function syncCard(sync, sites) {
  if (sync.bytes === undefined) return null;
  const rows = [
    ["Sent each time", bytes(sync.bytes)],
    ["Waited each time", duration(sync.seconds)],
    ["Of the bytes of exact fp32 sums", sync.ratio === undefined ? null : percent(sync.ratio, sync.ratio < 0.1 ? 1 : 0)],
    ["Steps since they had agreed", sync.staleness === undefined ? null : number(sync.staleness)],
    ["Distance between them", sync.distance === undefined ? null : number(sync.distance)],
  ].filter(([, value]) => value !== null);
  return card(
    sites.length ? "Sites agree in fewer bytes" : "Replicas agree in fewer bytes",
    table([{ text: "Figure" }, { text: "Mean", number: true }], rows, {
      caption: "Agreement of replicas or sites, mean of the steps shown",
    }),
    sites.length ? sitesTable(sites) : null,
  );
}

function sitesTable(sites) {
  const head = ["Took part in", "Its weights moved by", "From the mean of all"].map((text) => ({ text, number: true }));
  const rows = sites.map((site) => [
    site.site,
    `${number(site.rounds)} of ${number(site.of_rounds)} rounds`,
    number(site.norm),
    number(site.spread),
  ]);
  return table([{ text: "Site" }, ...head], rows, { caption: "Sites in the rounds of the steps shown" });
}

export default { name: "time", title: "Where the time goes", create };
