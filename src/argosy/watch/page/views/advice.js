// What could be better, what will come, and what was alarming. Every sentence with its evidence.

import { ofRun } from "../api.js";
import { card, nothing } from "../bars.js";
import { h, replace } from "../dom.js";
import { clock, duration, grouped, interval, loss, money, words } from "../format.js";

function create(root, page) {
  async function refresh(signal) {
    const answer = await ofRun(page.primary(), "advice", {}, signal);
    const advice = answer.advice ?? [];
    const alerts = answer.alerts ?? [];
    replace(
      root,
      h(
        "div",
        { class: "stack-of-cards" },
        alerts.length
          ? card(
              alerts.length === 1 ? "Alert" : "Alerts",
              h("ol", { class: "alerts" }, [...alerts].sort((a, b) => (b.time_s ?? 0) - (a.time_s ?? 0)).map(alertRow)),
            )
          : null,
        forecastCard(answer.forecast, page.summary(page.primary())),
        advice.length
          ? h("div", { class: "advice" }, advice.map(adviceCard))
          : nothing(
              "No advice: nothing that Argosy knows of would make this run clearly better.",
              "Rules look at stragglers, waits, data, memory, checkpoints, number formats and the planner’s other plans.",
            ),
        stopsCard(answer.stops),
      ),
    );
  }
  return { refresh };
}

function adviceCard(each) {
  return h(
    "article",
    { class: `card advice-card ${each.severity ?? ""}`, "data-rule": each.rule },
    h("h3", {}, each.title, each.gain ? h("span", { class: "gain" }, gain(each.gain)) : null),
    evidence(each.evidence),
    each.do || each.plan
      ? h(
          "p",
          { class: "do" },
          h("b", {}, "Do: "),
          mono(each.do ?? ""),
          each.plan && !String(each.do).includes(each.plan) ? [" ", h("code", {}, `--plan ${each.plan}`)] : null,
        )
      : null,
  );
}

// A gain may be a sentence, or a share of the step's time.
const gain = (value) => (typeof value === "number" ? `about ${Math.round(100 * value)} % faster` : String(value));

function evidence(given) {
  if (Array.isArray(given))
    return h(
      "ul",
      { class: "evidence" },
      given.map((line) => h("li", {}, String(line))),
    );
  if (given && typeof given === "object")
    return h(
      "ul",
      { class: "evidence" },
      Object.entries(given).map(([key, value]) =>
        h("li", {}, `${words(key)}: ${typeof value === "object" ? JSON.stringify(value) : value}`),
      ),
    );
  return given ? h("p", { class: "evidence" }, String(given)) : null;
}

/** Text in which `code` between backticks is set as code. */
function mono(text) {
  return String(text)
    .split("`")
    .map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

function alertRow(each) {
  return h(
    "li",
    {},
    h("time", {}, clock(each.time_s, true)),
    h(
      "b",
      { class: each.state === "ends" ? "muted" : each.severity === "critical" ? "bad" : "warn" },
      words(each.alert ?? "alert"),
      each.state === "ends" ? ", over" : "",
    ),
    h("span", { class: "what" }, each.why ?? "", each.do ? h("span", { class: "muted" }, " ", mono(each.do)) : null),
    h("span", { class: "muted" }, each.step === undefined || each.step === null ? "" : `step ${grouped(each.step)}`),
  );
}

/** What stopped the run, by component, beside what the catalogue of failures expects. */
function stopsCard(stops) {
  if (!stops) return null;
  const row = (each) =>
    h(
      "tr",
      {},
      h("td", {}, each.called),
      h("td", { class: "number" }, stopCount(each.expected)),
      h("td", { class: "number" }, `${each.low} to ${each.high}`),
      h("td", { class: `number ${each.seen > each.high ? "bad" : ""}` }, grouped(each.seen ?? 0)),
    );
  return card(
    "What stopped it",
    stops.components.length
      ? h(
          "table",
          { class: "stops" },
          h("thead", {}, h("tr", {}, ["component", "expected", "90 % interval", "seen"].map((name) => h("th", {}, name)))),
          h("tbody", {}, stops.components.map(row)),
        )
      : null,
    h("p", { class: "muted" }, stops.words),
  );
}

const stopCount = (value) => (value >= 10 ? grouped(Math.round(value)) : Number(value).toPrecision(2));

function forecastCard(forecast, run) {
  const [low, middle, high] = interval(forecast?.end_s);
  if (!middle) return forecast?.words ? card("Forecast", h("p", {}, forecast.words)) : null;
  const [cheap, cost, dear] = interval(forecast.cost);
  const [least, likely, most] = interval(forecast.loss);
  const currency = forecast.currency ?? run?.currency;
  const row = (term, value, interval) =>
    h("div", {}, h("dt", {}, term), h("dd", { class: "value" }, value), h("dd", { class: "sub" }, interval));
  return card(
    "Forecast",
    h(
      "dl",
      { class: "vitals inside" },
      row("Ends", clock(middle), `${clock(low)} to ${clock(high)} (90 % interval)`),
      row(
        "Left",
        duration(middle - Date.now() / 1000),
        forecast.steps_left ? `${grouped(forecast.steps_left)} steps` : "",
      ),
      cost === undefined || cost === null
        ? null
        : row("Total cost", money(cost, currency), `between ${money(cheap)} and ${money(dear)}`),
      likely === undefined || likely === null
        ? null
        : row("Loss in the end", loss(likely), `between ${loss(least)} and ${loss(most)}`),
    ),
    forecast.words ? h("p", { class: "muted" }, forecast.words) : null,
  );
}

export default { name: "advice", title: "Advice", create };
