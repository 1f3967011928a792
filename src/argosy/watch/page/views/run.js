// The curves of one or more runs.

import { ofRun } from "../api.js";
import { nothing, table } from "../bars.js";
import { Chart } from "../charts.js";
import { extent } from "../curves.js";
import { h, replace } from "../dom.js";
import { duration, forKey, loss, money, number, percent, title } from "../format.js";
import { RangeBar } from "../range.js";
import { progressText, stateMark } from "../runs.js";
import * as state from "../state.js";
import { isFault } from "../vitals.js";

const KEYS = ["loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_time_s"];
const CHARTS = ["loss", "grad_norm", "tokens_per_s", "mfu", "lr", "step_time_s"];
const MARKED = new Set(["loss", "grad_norm"]); // with faults, recoveries, and steps that were not finite
const DOTS_UP_TO = 120;
const EVALUATIONS_UP_TO = 800;
const EVALUATED_MS = 10000; // evaluations are rare: they are not asked for at each step
/** What the user's code logged. */
const isOwn = (key) => key.startsWith("user.");
const TASK = "tasks.";
/** The metrics of tasks that were scored, such as tasks.arc_easy.acc; their standard errors are no curves. */
const tasksOf = (evaluations) => [
  ...new Set(
    evaluations
      .flatMap((each) => Object.keys(each?.tasks ?? {}))
      .filter((key) => !key.endsWith("_stderr"))
      .map((key) => TASK + key),
  ),
];
/** What reward models are judged by: the share of held-out pairs that they tell apart. */
const ACCURACY = "validation_accuracy";
const POSITIONS = new Set(["step", "time_s", "first_sample"]); // they say where, not what
const RECOVERED = new Set(["recovered", "resume", "migrated", "replan"]);

function create(root, page) {
  const charts = new Map();
  const strip = new RangeBar({
    move: (from, to) => [...charts.values()].forEach((chart) => chart.show(from, to)),
    choose: page.zoom,
    all: page.all,
  });
  const controls = tools(page);
  const compared = h("div", {});
  const grid = h("div", { class: "charts" });
  const empty = h("div", {});
  replace(root, controls.element, compared, strip.element, grid, empty);
  const evaluated = new Map();
  let marks = [];
  let known = [];
  let whole = { at: 0 };
  strip.element.hidden = controls.element.hidden = true;

  const choices = () => known.filter((key) => !KEYS.includes(key) && !isOwn(key) && !POSITIONS.has(key));
  const chartOf = (key) => {
    if (!charts.has(key)) {
      const chart = new Chart({
        title: title(key),
        format: forKey(key),
        axis: forKey(key) === loss ? number : forKey(key),
        height: key === "loss" ? 260 : 150,
        zoom: page.zoom,
        reset: page.all,
      });
      chart.element.classList.toggle("large", key === "loss");
      charts.set(key, chart);
    }
    return charts.get(key);
  };

  async function refresh(signal) {
    const ids = page.chosen();
    const points = Math.max(200, Math.min(2000, Math.round(root.clientWidth)));
    const keys = [...new Set([...KEYS, ...known.filter(isOwn), ...state.get().more])];
    const ask = (part) =>
      Promise.all(ids.map((id) => ofRun(id, part, { keys: keys.join(","), points, ...page.range() }, signal)));
    // A run of very many steps takes seconds to read: at first some of them are shown.
    const first = charts.size ? null : await ask("preview");
    const isPreview = first?.some((answer) => answer.is_preview);
    if (isPreview) {
      await draw(ids, first, [], signal);
      replace(empty, h("p", { class: "state" }, "Some of the steps, while all of them are read …"));
    }
    const answers = first && !isPreview ? first : await ask("series");
    await draw(ids, answers, await Promise.all(ids.map((id) => evaluationsOf(id, signal))), signal);
  }

  async function draw(ids, answers, evaluations, signal) {
    const { more, smooth, log } = state.get();
    const accuracy = evaluations.some((each) => each?.accuracy) ? [ACCURACY] : [];
    const own = [...known.filter(isOwn), ...accuracy, ...tasksOf(evaluations)];
    await overview(ids, answers, signal);
    const none = !page.window() && !answers.some((answer) => answer.step.length);
    replace(
      empty,
      none
        ? nothing(
            "No step has been made yet.",
            "The first one takes longest: processes start and the model is compiled.",
          )
        : null,
    );
    grid.hidden = controls.element.hidden = none;
    const window_ = page.window();
    for (const key of [...CHARTS, ...own, ...more]) {
      const series = ids.flatMap((id, i) => curves(page, id, key, answers[i], evaluations[i], window_));
      const wanted = KEYS.includes(key)
        ? key === "loss" || key === "grad_norm" || series.some((each) => each.step.length)
        : true;
      const chart = chartOf(key);
      chart.element.hidden = !wanted;
      if (wanted)
        chart.update({
          series,
          window: window_ ?? whole.ends,
          marks: MARKED.has(key) ? marks : [],
          logX: log?.includes("x"),
          logY: log?.includes("y"),
          smooth,
        });
    }
    for (const [key, chart] of charts) {
      if (![...CHARTS, ...own, ...more].includes(key)) {
        chart.destroy();
        charts.delete(key);
      }
    }
    const elements = [...new Set([...CHARTS, ...own, ...more])].map((key) => charts.get(key)?.element).filter(Boolean);
    if (elements.some((element, i) => grid.children[i] !== element) || grid.children.length !== elements.length)
      replace(grid, elements);
    controls.update(choices());
    replace(compared, ids.length > 1 ? comparison(page, ids) : null);
    strip.element.hidden = !whole.ends || none;
    if (whole.ends) strip.update(whole.ends, window_, whole.values);
  }

  async function evaluationsOf(id, signal) {
    const before = evaluated.get(id);
    if (before && performance.now() - before.at < EVALUATED_MS) return before.answer;
    const answer = await ofRun(id, "evaluations", {}, signal).catch(() => null);
    if (!signal.aborted) evaluated.set(id, { at: performance.now(), answer });
    return answer;
  }

  // The strip shows the whole run: a question of its own only while the charts show a part of it.
  async function overview(ids, answers, signal) {
    const now = performance.now();
    if (page.window()) {
      if (whole.ids === ids.join() && now - whole.at < 15000) return;
      answers = await Promise.all(ids.map((id) => ofRun(id, "series", { keys: "loss", points: 300 }, signal)));
    }
    const ends = extent(answers.map((answer) => [answer.first, answer.last]));
    // The longest run's curve fills the strip.
    const longest = answers.find((answer) => answer.last === ends?.[1]);
    whole = {
      ids: ids.join(),
      at: now,
      ends: ends && ends[1] > ends[0] ? ends : null,
      values: longest?.keys.loss?.mean ?? [],
    };
  }

  return {
    refresh,
    /** The run has these numbers. True if the charts lack one that is the reader's own. */
    learn(keys) {
      const lacking = keys.some((key) => isOwn(key) && !known.includes(key));
      known = keys;
      controls.update(choices());
      return lacking;
    },
    marks(events) {
      const before = JSON.stringify(marks);
      marks = marksOf(events?.events ?? []);
      if (JSON.stringify(marks) === before) return;
      for (const key of ["loss", "grad_norm"])
        if (charts.get(key)?.drawn) charts.get(key).update({ ...charts.get(key).drawn, marks });
    },
    recolour: () => charts.forEach((chart) => chart.recolour()),
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}

function marksOf(events) {
  const found = events.filter((event) => Number.isFinite(event.step) && (isFault(event) || RECOVERED.has(event.event)));
  const unique = new Map(found.map((event) => [`${event.step} ${RECOVERED.has(event.event)}`, event]));
  return [...unique.values()]
    .slice(-60)
    .map((event) => ({ step: event.step, colour: RECOVERED.has(event.event) ? "good" : "bad" }));
}

/** The evaluations in a window; of very many, some that are evenly spread, and the last. */
function within(step, values, window_) {
  const inside = step.map((_, i) => i).filter((i) => !window_ || (step[i] >= window_[0] && step[i] <= window_[1]));
  const stride = Math.ceil(inside.length / EVALUATIONS_UP_TO);
  const kept = inside.filter((_, i) => i % stride === 0 || i === inside.length - 1);
  return { step: kept.map((i) => step[i]), mean: kept.map((i) => values[i]) };
}

function curves(page, id, key, answer, evaluation, window_) {
  const several = page.chosen().length > 1;
  const name = page.named(id);
  // Norms have steps of their own.
  const found = answer.keys[key] ? answer : answer.norms;
  const values = found?.keys[key];
  const about = { run: name, colour: page.colour(id) };
  const result = [];
  if (values) {
    result.push({
      ...about,
      name: several ? name : key === "loss" ? "training" : title(key),
      step: found.step,
      ...values,
      bad: MARKED.has(key) ? answer.bad : [],
    });
  }
  if (key === "loss" && evaluation?.step?.length) {
    const { step, mean } = within(evaluation.step, evaluation.loss, window_);
    const dotted = step.length <= DOTS_UP_TO;
    const colour = several ? about.colour : about.colour === "run-1" ? "run-0" : "run-1";
    const named = several ? `${name}, validation` : "validation";
    result.push({
      ...about,
      name: named,
      step,
      mean,
      dash: dotted ? [5, 4] : undefined,
      points: dotted,
      isSparse: true,
      colour,
    });
  }
  const scores =
    key === ACCURACY
      ? evaluation?.accuracy && [evaluation.step, evaluation.accuracy]
      : key.startsWith(TASK) && evaluation?.tasks?.[key.slice(TASK.length)];
  if (scores) {
    const { step, mean } = within(...scores, window_);
    result.push({ ...about, name: several ? name : title(key), step, mean, points: true, isSparse: true });
  }
  return result;
}

function tools() {
  const { smooth = 0 } = state.get();
  const shown = h("output", { class: "number" }, smooth.toFixed(2));
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: smooth,
    id: "smooth",
    oninput: () => state.set({ smooth: Number(slider.value) || undefined }),
  });
  const logs = ["y", "x"].map((axis) => {
    const turn = () => {
      const now = state.get().log ?? "";
      state.set({ log: (now.includes(axis) ? now.replace(axis, "") : now + axis) || undefined });
    };
    return [
      axis,
      h(
        "button",
        { type: "button", class: "toggle", onclick: turn, "data-log": axis },
        axis === "y" ? "log values" : "log steps",
      ),
    ];
  });
  const add = h("select", {
    "aria-label": "Add a curve",
    onchange: () => state.set({ more: [...state.get().more, add.value] }),
  });
  const removed = h("span", { class: "chips" });
  const element = h(
    "div",
    { class: "tools-bar" },
    h("label", { for: "smooth" }, "Smoothing"),
    slider,
    shown,
    logs.map(([, button]) => button),
    add,
    removed,
  );
  const update = (keys) => {
    const { smooth: factor = 0, log, more } = state.get();
    slider.value = factor;
    shown.textContent = factor.toFixed(2);
    for (const [axis, button] of logs) button.setAttribute("aria-pressed", String(Boolean(log?.includes(axis))));
    const free = keys.filter((key) => !more.includes(key));
    const text = free.join(",");
    if (add.dataset.keys !== text) {
      add.dataset.keys = text;
      replace(
        add,
        h("option", { value: "" }, "Add a curve …"),
        free.map((key) => h("option", { value: key }, key)),
      );
    }
    add.value = "";
    add.hidden = !free.length;
    replace(
      removed,
      more.map((key) =>
        h(
          "button",
          {
            type: "button",
            class: "chip",
            title: `Take ${key} away`,
            onclick: () => state.set({ more: more.filter((each) => each !== key) }),
          },
          key,
          " ×",
        ),
      ),
    );
  };
  return { element, update };
}

function comparison(page, ids) {
  const head = [
    { text: "Run" },
    { text: "State" },
    ...["Step", "Loss", "Validation", "Tokens/s", "MFU", "Left", "Cost"].map((text) => ({ text, number: true })),
  ];
  const rows = ids.map((id) => {
    const run = page.summary(id) ?? { id };
    const name = h(
      "span",
      { class: "run-name" },
      h("i", { class: "swatch", style: { "--c": `var(--${page.colour(id)})` } }),
      page.named(id),
    );
    return [
      name,
      stateMark(run.state),
      progressText(run),
      loss(run.loss),
      loss(run.validation_loss),
      number(run.tokens_per_s),
      percent(run.mfu, 1),
      run.state === "training" ? duration(run.eta_s) : "–",
      money(run.cost, run.currency),
    ];
  });
  return h("section", { class: "card flush" }, table(head, rows, { caption: "The chosen runs beside each other" }));
}

export default { name: "run", title: "Run", create };
