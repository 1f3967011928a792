// The page: its frame, what is chosen, and who is asked when. The views draw the rest.

import { get, ofRun, follow } from "./api.js";
import { forget, ofRuns } from "./colours.js";
import { drawBar, drawLive, turnTheme } from "./bar.js";
import { h, replace } from "./dom.js";
import { ago } from "./format.js";
import { listen, showSheet } from "./keys.js";
import { refresher } from "./refresher.js";
import { labelled, RunList, RunTable } from "./runs.js";
import * as state from "./state.js";
import { drawVitals, TOLD } from "./vitals.js";
import advice from "./views/advice.js";
import devices from "./views/devices.js";
import energy from "./views/energy.js";
import events from "./views/events.js";
import memory from "./views/memory.js";
import model from "./views/model.js";
import profiles from "./views/profiles.js";
import ranks from "./views/ranks.js";
import run from "./views/run.js";
import time from "./views/time.js";

const VIEWS = [run, time, memory, ranks, devices, events, model, advice, energy, profiles];
const main = document.getElementById("main");

/** What views know of the page. */
const page = {
  runs: [],
  colours: new Map(),
  /** The chosen runs that exist; all, while it is not known which do. */
  chosen: () => (page.runs.length ? state.get().run.filter((id) => page.summary(id)) : state.get().run),
  /** The run that a view of one run shows. */
  primary: () => (page.chosen().includes(state.get().of) ? state.get().of : page.chosen()[0]),
  summary: (id) => page.runs.find((each) => each.id === id),
  named: (id) => page.summary(id)?.label || id,
  colour: (id) => page.colours.get(id) ?? ofRuns([id]).get(id),
  /** The steps shown, [from, to]; null for all. A negative `from` counts from the end, so that it follows the run. */
  window() {
    const { from, to } = state.get();
    const last = Math.max(0, ...page.chosen().map((id) => page.summary(id)?.step ?? 0));
    if (from === undefined && to === undefined) return null;
    return [from < 0 ? Math.max(0, last + from) : (from ?? 0), to ?? last];
  },
  range: () => (page.window() ? { from: Math.floor(page.window()[0]), to: Math.ceil(page.window()[1]) } : {}),
  zoom: (from, to) => state.set({ from: Math.max(0, Math.floor(from)), to: Math.max(1, Math.ceil(to)) }),
  all: () => state.set({ from: undefined, to: undefined }),
};

let view = null;
let shown = null; // what is in main: "home", or view and runs
let table = null;
let list = null;
let known = null; // of the run in the strip: its keys and events
let drawn = () => {};
let firstDrawing = Promise.resolve();
let live = { state: "waiting", since: Date.now() / 1000 };

const lists = refresher(
  async (signal) => {
    page.runs = labelled(await get("runs", {}, signal));
    const { run: chosen } = state.get();
    if (!chosen.length && page.runs.length === 1) return state.set({ run: [page.runs[0].id] });
    document.body.classList.toggle("single", page.runs.length === 1);
    table?.update(page.runs);
    list?.update(page.runs, chosen);
    // A run that was waited for has come, or one is gone.
    if (shown && shown !== "home" && chosen.length && shown !== frameOf()) render();
  },
  (error) => trouble("list", error),
);

// One after the other: the strip stands before events and advice have come.
const vitals = refresher(
  async (signal) => {
    const id = page.primary();
    const place = document.getElementById("vitals");
    if (!id || !place) return;
    const detail = await ofRun(id, "", {}, signal);
    known = { id, keys: detail.keys ?? [] };
    if (view?.drawing.learn?.(known.keys)) drawing.soon();
    if (!place.childElementCount) drawVitals(place, detail, null, null);
    // In a long run advice takes seconds to find: what the reader came for goes first.
    await firstDrawing;
    const quiet = (promise) => promise.catch(() => ({ failed: true }));
    const asked = [ofRun(id, "advice", {}, signal), ofRun(id, "events", { kinds: TOLD }, signal)];
    const [told, happened] = await Promise.all(asked.map(quiet));
    if (signal.aborted) return;
    drawVitals(place, detail, told, happened);
    known.events = happened;
    view?.drawing.marks?.(happened);
  },
  (error) => trouble("vitals", error),
  3000,
);

const drawing = refresher(
  async (signal) => {
    if (!view) return;
    const current = view;
    await current.drawing.refresh(signal);
    if (view === current) current.loading.hidden = true;
  },
  (error) => {
    trouble("view", error);
    drawn();
    if (error && view) view.loading.hidden = true;
  },
);

/** Say what is wrong above what is shown; null takes it back. */
function trouble(what, error) {
  const place = document.getElementById("trouble");
  if (error && error.status === undefined) console.error(error);
  if (!place) return;
  place.querySelector(`[data-what="${what}"]`)?.remove();
  const same = [...place.children].some((each) => each.dataset.text === error?.message);
  if (!error || same) return;
  const again = () => [lists, vitals, drawing].forEach((each) => each.now());
  const retry = h("button", { type: "button", class: "quiet", onclick: again }, "Try again");
  place.append(
    h(
      "div",
      { class: "notice bad", role: "alert", "data-what": what, "data-text": error.message },
      h("p", {}, error.message),
      retry,
    ),
  );
}

function home() {
  shown = "home";
  document.body.classList.add("home");
  const root = h("div", {});
  replace(main, h("div", { id: "trouble" }), root);
  table = new RunTable(root);
  if (page.runs.length) table.update(page.runs);
  document.title = "Runs – Argosy";
}

function frame() {
  document.body.classList.remove("home");
  table = null;
  if (!list) {
    list = new RunList(document.getElementById("side"), page.colour);
  }
  list.update(page.runs, page.chosen());
  const [only] = page.chosen();
  const lost = state.get().run.filter((id) => !page.chosen().includes(id));
  const gone = lost.length
    ? h(
        "div",
        { class: "notice bad", role: "alert" },
        h("p", {}, `There is no run ${lost.join(", ")} in this folder.`),
        h("button", { type: "button", class: "quiet", onclick: toHome }, "All runs"),
      )
    : null;
  if (only === undefined) return replace(main, h("div", { id: "trouble" }), gone);
  const title = h(
    "div",
    { class: "head" },
    h(
      "h1",
      { title: page.chosen().join(", ") },
      page.chosen().length > 1 ? `${page.chosen().length} runs` : page.named(only),
    ),
    h("div", { id: "of" }),
  );
  const tabs = h(
    "nav",
    { class: "tabs", "aria-label": "Views" },
    VIEWS.map((each) => tab(each)),
  );
  replace(main, h("div", { id: "trouble" }), gone, title, h("div", { id: "vitals" }), tabs, h("div", { id: "view" }));
  chips();
}

// With several runs, views of one run need to be told which.
function chips() {
  const place = document.getElementById("of");
  if (page.chosen().length < 2) return replace(place);
  replace(
    place,
    h(
      "div",
      { class: "chips", role: "group", "aria-label": "Run of the strip and of views that show one" },
      page.chosen().map((id) =>
        h(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-pressed": String(id === page.primary()),
            style: { "--c": `var(--${page.colour(id)})` },
            onclick: () => state.set({ of: id }),
          },
          h("i", { class: "swatch" }),
          page.named(id),
        ),
      ),
    ),
  );
}

function tab(each) {
  const go = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    state.set({ view: each.name }, { step: true });
  };
  const current = each === currentView();
  return h(
    "a",
    {
      href: state.link({ view: each.name }),
      "aria-current": current ? "page" : null,
      onclick: go,
      "data-view": each.name,
    },
    each.title,
  );
}

const currentView = () => VIEWS.find((each) => each.name === state.get().view) ?? VIEWS[0];

function openView() {
  view?.drawing.destroy?.();
  firstDrawing = new Promise((done) => (drawn = done));
  const root = document.getElementById("view");
  const chosen = currentView();
  const loading = h("p", { class: "state loading" }, "Loading …");
  const body = h("div", { class: `view view-${chosen.name}` });
  replace(root, h("h2", { class: "unseen" }, chosen.title), loading, body);
  view = { name: chosen.name, loading, drawing: chosen.create(body, page) };
  if (known?.id === page.primary()) {
    view.drawing.learn?.(known.keys);
    view.drawing.marks?.(known.events);
  }
  for (const each of document.querySelectorAll(".tabs a")) {
    if (each.dataset.view === chosen.name) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
    each.href = state.link({ view: each.dataset.view });
    if (each.dataset.view === chosen.name) each.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  document.title = `${page.chosen().map(page.named).join(", ")} – ${chosen.title} – Argosy`;
}

/** What the frame depends on. */
const frameOf = () => JSON.stringify([state.get().run, page.chosen(), state.get().of]);

function render() {
  const { run: chosen } = state.get();
  page.colours = ofRuns(chosen);
  const now = chosen.length ? frameOf() : "home";
  const other = now !== shown;
  if (other) {
    drawing.stop();
    vitals.stop();
    if (now === "home") {
      view?.drawing.destroy?.();
      view = null;
      home();
    } else frame();
    shown = now;
  }
  if (now === "home" || !page.chosen().length) return;
  if (other || view?.name !== currentView().name) openView();
  if (other) vitals.now();
  drawing.now();
}

function toHome() {
  if (page.runs.length !== 1)
    state.set({ run: [], view: undefined, from: undefined, to: undefined, of: undefined }, { step: true });
}

function recolour() {
  forget();
  view?.drawing.recolour?.();
}

function step(by, of, current) {
  const at = of.indexOf(current);
  return of[(at + by + of.length) % of.length];
}

const nextView = (by) =>
  state.get().run.length && state.set({ view: step(by, VIEWS, currentView()).name }, { step: true });
function nextRun(by) {
  const ids = page.runs.map((each) => each.id);
  if (ids.length) state.set({ run: [step(by, ids, page.chosen()[0])] }, { step: true });
}

const smoothing = (by) =>
  state.set({
    smooth: Math.round(100 * Math.max(0, Math.min(0.99, (state.get().smooth ?? 0) + by))) / 100 || undefined,
  });

drawBar(toHome, recolour);
drawLive(live);
state.subscribe(render);
listen({
  "?": showSheet,
  "[": () => nextView(-1),
  "]": () => nextView(1),
  j: () => nextRun(1),
  k: () => nextRun(-1),
  r: toHome,
  "/": () => (table ?? list)?.focusFilter(),
  l: () =>
    state.set({
      log: state.get().log?.includes("y") ? state.get().log.replace("y", "") || undefined : `${state.get().log ?? ""}y`,
    }),
  s: () => smoothing(0.1),
  S: () => smoothing(-0.1),
  z: page.all,
  t: turnTheme,
  Escape: () => document.body.classList.remove("drawer"),
  ...Object.fromEntries(
    VIEWS.map((each, i) => [
      String((i + 1) % 10),
      () => state.get().run.length && state.set({ view: each.name }, { step: true }),
    ]),
  ),
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
document.addEventListener("click", (event) => {
  if (document.body.classList.contains("drawer") && !event.target.closest(".side, .drawer-button"))
    document.body.classList.remove("drawer");
});

follow(
  (change) => {
    lists.soon();
    if (page.chosen().includes(change.id)) {
      drawing.soon();
      if (change.id === page.primary()) vitals.soon();
    }
  },
  (now) => {
    const back = now === "live" && live.state !== "live";
    if (now === "live" || live.state === "live") live = { state: now, since: Date.now() / 1000 };
    else live.state = now;
    drawLive(live);
    // What happened meanwhile was not told.
    if (back) [lists, vitals, drawing].forEach((each) => each.soon());
  },
);

// "3 s ago" grows old by itself.
setInterval(() => {
  for (const each of document.querySelectorAll("time[data-ago]")) each.textContent = ago(Number(each.dataset.ago));
}, 1000);

await lists.now();
render();
