// Energy, carbon and money: measured where the hardware tells, estimated elsewhere and said to be so.

import { ofRun } from "../api.js";
import { card, nothing, table } from "../bars.js";
import { Chart } from "../charts.js";
import { h, replace } from "../dom.js";
import { money, number } from "../format.js";

const SOURCES = {
  nvml: "measured by the devices (NVML)",
  rapl: "measured by the processors (RAPL)",
  estimate: "estimated from the catalogue of devices, not measured",
};

const kwh = (value) =>
  value === null || value === undefined ? "–" : value < 0.1 ? `${number(1000 * value)} Wh` : `${number(value)} kWh`;
const carbon = (value) =>
  value === null || value === undefined ? "–" : value < 0.1 ? `${number(1000 * value)} g` : `${number(value)} kg`;

function create(root, page) {
  const chart = new Chart({
    title: "Power",
    format: (value, more) => `${number(value, more)} W`,
    height: 170,
    isTime: true,
    group: "energy",
  });
  const top = h("div", { class: "stack-of-cards" });
  replace(root, h("div", { class: "stack-of-cards" }, top, chart.element));

  async function refresh(signal) {
    const answer = await ofRun(page.primary(), "energy", {}, signal);
    const { series } = answer;
    chart.element.hidden = !(series?.time_s?.length > 1);
    if (!chart.element.hidden)
      chart.update({
        series: [
          {
            name: page.named(page.primary()),
            run: page.named(page.primary()),
            colour: page.colour(page.primary()),
            // Each is the mean of the time that begins there; the last one is as long as those before.
            step: [...series.time_s, 2 * series.time_s.at(-1) - series.time_s.at(-2)],
            mean: [...series.power_w, series.power_w.at(-1)],
            isStepped: true,
          },
        ],
        window: null,
      });
    replace(
      top,
      answer.kwh === null || answer.kwh === undefined
        ? nothing(
            "No energy has been counted yet.",
            "It is counted by each node, from NVML, RAPL or the catalogue of devices.",
          )
        : summary(answer),
    );
  }
  return { refresh, recolour: () => chart.recolour(), destroy: () => chart.destroy() };
}

function summary(answer) {
  const sources = String(answer.source ?? "")
    .split("+")
    .filter(Boolean);
  const told = sources.map((source) => SOURCES[source] ?? source).join(", ");
  const factor = answer.grid_kg_per_kwh
    ? `${number(1000 * answer.grid_kg_per_kwh)} g a kWh${answer.pue > 1 ? `, and PUE ${number(answer.pue)} of the building` : ""}`
    : "by the grid’s factor";
  const row = (term, value, sub) =>
    h("div", {}, h("dt", {}, term), h("dd", { class: "value" }, value), h("dd", { class: "sub" }, sub));
  const per = answer.per_token ?? {};
  const [plan, got] = [answer.predicted ?? {}, answer.measured ?? answer];
  const ratio = (key) => (plan[key] && got[key] ? `${(got[key] / plan[key]).toFixed(2)} ×` : "–");
  const rows = [
    ["Energy", kwh(plan.kwh), kwh(got.kwh), ratio("kwh")],
    ["CO₂", carbon(plan.co2_kg), carbon(got.co2_kg), ratio("co2_kg")],
    ["Money for it", money(plan.money, answer.currency), money(got.money, answer.currency), ratio("money")],
  ];
  return [
    card(
      "So far",
      h(
        "dl",
        { class: "vitals inside" },
        row("Energy", kwh(answer.kwh), told),
        answer.co2_kg === null || answer.co2_kg === undefined ? null : row("CO₂", carbon(answer.co2_kg), factor),
        answer.money === null || answer.money === undefined
          ? null
          : row("Money for it", money(answer.money, answer.currency), "price of the devices as long as they were held"),
        per.joules || per.kwh ? row("A token", `${number(per.joules ?? per.kwh * 3.6e6)} J`, "of all machines") : null,
      ),
      answer.words ? h("p", { class: "muted" }, answer.words) : null,
    ),
    Object.keys(plan).length
      ? card(
          "Predicted beside measured",
          table(
            [
              { text: "" },
              { text: "Plan", number: true },
              { text: sources.includes("estimate") ? "Estimated" : "Measured", number: true },
              { text: "Ratio", number: true },
            ],
            rows,
            { caption: "Energy, predicted and measured" },
          ),
        )
      : null,
  ];
}

export default { name: "energy", title: "Energy", create };
