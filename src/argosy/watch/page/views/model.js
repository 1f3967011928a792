// The model from inside: norms by layer, load of the experts, and what it writes.

import { ofRun } from "../api.js";
import { card, nothing } from "../bars.js";
import { extent } from "../curves.js";
import { h, replace } from "../dom.js";
import { clock, grouped, number, percent } from "../format.js";
import { HeatMap, rampLegend } from "../heatmap.js";
import * as state from "../state.js";

const KINDS = ["gradient", "weight", "update"];

function create(root, page) {
  let norms = null;
  let experts = null;
  const choice = h("div", { class: "chips", role: "group", "aria-label": "Norm of" });
  const map = new HeatMap({
    label: "Norms by layer and step",
    height: 360,
    describe: (row, column) => [
      norms.layers[row],
      `step ${grouped(norms.step[column])}`,
      `${kind()} norm ${number(norms[kind()][row]?.[column])}`,
    ],
  });
  const load = new HeatMap({
    label: "Load by layer and expert",
    height: 300,
    describe: (row, column) => [
      `${experts.layers[row]}, expert ${column}`,
      `${percent(experts.load[row][column], 1)} of the layer’s tokens`,
      `even would be ${percent(1 / experts.load[row].length, 1)}`,
    ],
  });
  const legend = h("div", {});
  const loadLegend = h("div", {});
  const samples = h("div", {});
  const normCard = h(
    "section",
    { class: "card" },
    h("header", {}, h("h3", {}, "Norms by layer"), choice),
    legend,
    map.element,
  );
  const loadCard = h(
    "section",
    { class: "card" },
    h("header", {}, h("h3", {}, "Load of the experts")),
    loadLegend,
    load.element,
  );
  const empty = h("div", {});
  replace(root, h("div", { class: "stack-of-cards" }, normCard, loadCard, samples), empty);
  const available = () => KINDS.filter((each) => norms?.[each]?.length);
  const kind = () => (available().includes(state.get().key) ? state.get().key : (available()[0] ?? "gradient"));

  async function refresh(signal) {
    const answer = await ofRun(page.primary(), "model", page.range(), signal);
    norms = answer.norms?.step?.length && answer.norms.layers?.length ? answer.norms : null;
    experts = answer.experts?.load?.length ? { ...answer.experts, load: answer.experts.load.map(shares) } : null;
    normCard.hidden = !norms;
    loadCard.hidden = !experts;
    if (norms) drawNorms();
    if (experts) drawLoad();
    const texts = answer.samples ?? [];
    replace(samples, texts.length ? written(texts) : null);
    replace(
      empty,
      norms || experts || texts.length
        ? null
        : nothing(
            "Nothing of the model has been written down in this range.",
            "Norms come every observe.norms_every_steps steps, samples with observe.sample_every_steps and evaluate.sample_prompt.",
          ),
    );
  }

  function drawNorms() {
    replace(
      choice,
      available().map((each) =>
        h(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-pressed": String(each === kind()),
            onclick: () => state.set({ key: each }),
          },
          each,
        ),
      ),
    );
    const values = norms[kind()];
    const logs = values.map((row) => row.map((value) => (value > 0 ? Math.log10(value) : null)));
    const [low, high] = extent(logs) ?? [0, 1];
    map.update({
      values,
      ramp: "even",
      share: (value) => (value > 0 && high > low ? (Math.log10(value) - low) / (high - low) : 0.5),
      rowNames: norms.layers.map(short),
      columnNames: norms.step.map((step) => grouped(step)),
    });
    replace(legend, rampLegend("even", number(10 ** low), "on a logarithmic scale", number(10 ** high)));
  }

  function drawLoad() {
    const count = experts.load[0].length;
    load.update({
      values: experts.load,
      ramp: "relative",
      share: (value) => (value > 0 ? Math.log(value * count * 2) / Math.log(4) : 0),
      rowNames: experts.layers.map(short),
      columnNames: [...Array(count).keys()].map(String),
    });
    replace(loadLegend, rampLegend("relative", "half", "of an even share; columns are experts", "twice"));
  }

  return { refresh, recolour: () => (map.draw(), load.draw()), destroy: () => (map.destroy(), load.destroy()) };
}

// Tokens of each expert, as shares of its layer's.
function shares(tokens) {
  const sum = tokens.reduce((total, each) => total + (each ?? 0), 0);
  return tokens.map((each) => (sum ? (each ?? 0) / sum : null));
}

const short = (layer) => String(layer).replace(/^(layers?|blocks?)\./, "");

function written(texts) {
  const items = texts
    .slice(-50)
    .reverse()
    .map((each) =>
      h(
        "article",
        { class: "sample" },
        h(
          "h4",
          {},
          `step ${grouped(each.step)}`,
          h("span", { class: "muted" }, each.time_s ? ` ${clock(each.time_s)}` : ""),
        ),
        h(
          "pre",
          { tabindex: "0" },
          h("b", {}, each.prompt),
          each.text?.startsWith(each.prompt ?? "\0") ? each.text.slice(each.prompt.length) : each.text,
        ),
      ),
    );
  return card("Written on the way", h("p", { class: "muted" }, "The prompt is bold; the newest is first."), items);
}

export default { name: "model", title: "Model", create };
