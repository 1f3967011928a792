// What happened: a timeline, what each thing cost, and where the wall time went.

import { ofRun } from "../api.js";
import { card, nothing, partsLegend, stackBar } from "../bars.js";
import { ofParts } from "../colours.js";
import { extent, ticks } from "../curves.js";
import { h, replace, svg } from "../dom.js";
import { bytes, clock, duration, forKey, grouped, percent, words } from "../format.js";
import * as state from "../state.js";
import { hideTip, showTip } from "../tip.js";
import { isFault } from "../vitals.js";

const LANES = [
  [
    "starts",
    "Starts",
    "accent",
    ["start", "end", "length", "generation", "worker_started", "coordinator_started", "agent_came", "finish", "signal"],
  ],
  ["saves", "Saves", "part-e", ["save", "verified", "prune", "drained", "memory_checkpoint_interval"]],
  ["faults", "Faults", "bad", ["fault", "break", "agent_left"]],
  [
    "recoveries",
    "Recoveries",
    "good",
    ["recovered", "resume", "fetched", "transient", "samples_replaced", "fork_server_replaced"],
  ],
  ["plans", "Plans", "part-d", ["replan", "migrated", "stayed", "migration_measured"]],
  ["others", "Others", "muted", []],
];
const QUIET = new Set([
  "worker_started",
  "prune",
  "verified",
  "node_checked",
  "memory_checkpoint_interval",
  "coordinator_started",
]);
const LIST_UP_TO = 500;
const TOGETHER_S = 10;
const KNOWN = new Set(["time_s", "event", "process", "by", "cost_s", "words", "why", "step", "kind", "processes"]);

function laneOf(event) {
  if (isFault(event)) return LANES[2];
  return LANES.find(([, , , kinds]) => kinds.includes(event.event)) ?? LANES.at(-1);
}

function create(root, page) {
  const goodput = h("div", {});
  const line = h("div", { class: "timeline" });
  const filters = h("div", { class: "chips", role: "group", "aria-label": "Kinds of events" });
  const list = h("ol", { class: "events" });
  const log = h(
    "details",
    { class: "card log", ontoggle: () => log.open && readLog() },
    h("summary", {}, "What the processes printed"),
    h("pre", { tabindex: "0" }, "Loading …"),
  );
  const body = h(
    "div",
    { class: "stack-of-cards" },
    goodput,
    card("Timeline", line),
    h("section", { class: "card" }, h("header", {}, h("h3", {}, "Events"), filters), list),
    log,
  );
  const empty = h("div", {});
  replace(root, body, empty);
  let answer = { events: [] };

  async function refresh(signal) {
    answer = await ofRun(page.primary(), "events", {}, signal);
    if (Array.isArray(answer)) answer = { events: answer };
    const none = !answer.events.length;
    body.hidden = none;
    replace(
      empty,
      none ? nothing("Nothing has happened yet.", "The run’s processes write here as soon as they start.") : null,
    );
    if (none) return;
    replace(goodput, goodputCard(answer.goodput));
    draw();
    if (log.open) await readLog(signal);
  }

  function draw() {
    const hidden = new Set((state.get().kinds ?? "").split(",").filter(Boolean));
    const counts = new Map(LANES.map(([name]) => [name, 0]));
    for (const event of answer.events) counts.set(laneOf(event)[0], counts.get(laneOf(event)[0]) + 1);
    const turn = (name) => {
      if (hidden.has(name)) hidden.delete(name);
      else hidden.add(name);
      state.set({ kinds: [...hidden].join(",") || undefined });
    };
    replace(
      filters,
      LANES.filter(([name]) => counts.get(name)).map(([name, title, colour]) =>
        h(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-pressed": String(!hidden.has(name)),
            style: { "--c": `var(--${colour})` },
            onclick: () => turn(name),
          },
          h("i", { class: "swatch square" }),
          `${title} ${grouped(counts.get(name))}`,
        ),
      ),
    );
    const shown = answer.events.filter((event) => !hidden.has(laneOf(event)[0]));
    replace(line, timeline(shown, Math.max(280, line.clientWidth || 800)));
    const lines = together(shown);
    const newest = lines.slice(-LIST_UP_TO).reverse();
    replace(
      list,
      newest.map((event) => row(event)),
      lines.length > newest.length || answer.more
        ? h(
            "li",
            { class: "muted" },
            `${grouped(lines.length - newest.length + (answer.more ?? 0))} older ones are in the run’s folder, events/.`,
          )
        : null,
    );
  }

  async function readLog(signal) {
    const told = await ofRun(page.primary(), "log", {}, signal).catch((error) => ({
      lines: [{ text: error.message }],
    }));
    const lines = Array.isArray(told) ? told : (told.lines ?? []);
    log.querySelector("pre").textContent =
      lines
        .map((each) => (typeof each === "string" ? each : `${each.process ? `${each.process}  ` : ""}${each.text}`))
        .join("\n") || "Nothing was printed.";
  }

  const resized = new ResizeObserver(() => answer.events.length && draw());
  resized.observe(line);
  return { refresh, destroy: () => (resized.disconnect(), hideTip()) };
}

function goodputCard(goodput) {
  const parts = Object.entries(goodput?.parts ?? {}).filter(([, value]) => value > 0);
  if (!parts.length) return null;
  const colours = ofParts(parts.map(([name]) => name));
  const list = parts.map(([name, value]) => ({ name: words(name), value, colour: colours.get(name) }));
  const wall = goodput.wall_s ?? list.reduce((sum, part) => sum + part.value, 0);
  const useful = goodput.goodput ?? (goodput.parts.useful ?? goodput.parts.steps ?? 0) / wall;
  return card(
    "Goodput",
    h("p", { class: "figure" }, h("b", {}, percent(useful, 1)), ` of ${duration(wall)} went into steps that count`),
    stackBar(list, wall, duration, { label: "Wall time:" }),
    partsLegend(list, duration),
  );
}

function timeline(events, width) {
  const ends = extent([events.map((event) => event.time_s)]);
  if (!ends) return h("p", { class: "muted" }, "None of these kinds.");
  const [from, to] = ends[0] === ends[1] ? [ends[0] - 1, ends[1] + 1] : ends;
  const lanes = LANES.filter((lane) => events.some((event) => laneOf(event) === lane));
  const [left, tall] = [92, 24];
  const x = (time) => left + 6 + ((time - from) / (to - from)) * (width - left - 18);
  const height = lanes.length * tall + 22;
  const places = ticks(from, to, Math.max(2, Math.floor((width - left) / 110)));
  return svg(
    "svg",
    {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `${events.length} events between ${clock(from)} and ${clock(to)}`,
    },
    lanes.map(([, title, colour], i) => [
      svg("line", { x1: left, x2: width, y1: (i + 0.5) * tall, y2: (i + 0.5) * tall, class: "lane" }),
      svg("text", { x: 0, y: (i + 0.5) * tall + 4, class: "lane-name" }, title),
      events.filter((event) => laneOf(event) === lanes[i]).map((event) => mark(event, x, (i + 0.5) * tall, colour)),
    ]),
    places.map((at) =>
      svg(
        "text",
        {
          x: x(at),
          y: height - 4,
          class: "at",
          "text-anchor": x(at) > width - 50 ? "end" : x(at) < left + 30 ? "start" : "middle",
        },
        clock(at, to - from < 600),
      ),
    ),
  );
}

// What took time is as long as it took; the rest is a dot.
function mark(event, x, y, colour) {
  const cost = event.cost_s > 0 ? event.cost_s : 0;
  const wide = cost ? x(event.time_s + cost) - x(event.time_s) : 0;
  const size = QUIET.has(event.event) ? 2.5 : 4.5;
  const about = [
    event.event.replaceAll("_", " "),
    clock(event.time_s, true),
    text(event),
    cost ? `cost ${duration(cost)}` : "",
  ].filter(Boolean);
  const attributes = {
    fill: `var(--${colour})`,
    onpointerenter: (at) => showTip(about, at.clientX, at.clientY),
    onpointerleave: hideTip,
  };
  if (wide > 2 * size)
    return svg("rect", { ...attributes, x: x(event.time_s), y: y - 4, width: wide, height: 8, rx: 3 });
  return svg("circle", { ...attributes, cx: x(event.time_s), cy: y, r: size });
}

function text(event) {
  const name = words(event.event);
  if (event.words) {
    // Name and step stand beside it already.
    const rest = event.words.startsWith(name) ? event.words.slice(name.length) : event.words;
    return rest.replace(/^[:,]? /, "").replace(/^step \d+(: |$)/, "");
  }
  if (event.why) return event.why;
  const facts = Object.entries(event).filter(
    ([key, value]) => !KNOWN.has(key) && value !== null && typeof value !== "object",
  );
  return facts
    .slice(0, 5)
    .map(([key, value]) => fact(key, value))
    .join(", ");
}

function fact(key, value) {
  if (typeof value !== "number") return `${words(key)} ${value}`;
  if (key === "seconds") return duration(value);
  if (key === "bytes") return bytes(value);
  return `${words(key.replace(/_(s|bytes)$/, ""))} ${/^(pid|port|slot|rank|generation|exit_code)$/.test(key) ? value : forKey(key)(value)}`;
}

// What many processes say at once, such as that they saved, is one line.
function together(events) {
  const lines = [];
  for (const event of events) {
    const before = lines.findLast((line) => line.event === event.event);
    const same = before && event.time_s - before.time_s < TOGETHER_S && before.step === event.step && !isFault(event);
    if (same && (text(before) === text(event) || event.event === "save")) {
      before.processes.add(event.process ?? event.by);
      before.cost_s = Math.max(before.cost_s ?? 0, event.cost_s ?? 0);
    } else lines.push({ ...event, processes: new Set([event.process ?? event.by]) });
  }
  return lines;
}

function whose({ processes }) {
  const [first, ...others] = [...processes].filter(Boolean);
  return others.length ? `${first} and ${others.length} more` : first;
}

// A save is that of so many steps done, which its words say.
const isStepSaid = ({ step, words }) =>
  step === undefined || step === null || (words ?? "").includes(` after ${step} steps`);

function row(event) {
  const [, , colour] = laneOf(event);
  return h(
    "li",
    { class: isFault(event) ? "fault" : null, "data-event": event.event },
    h("time", { title: new Date(1000 * event.time_s).toString() }, clock(event.time_s, true)),
    h("i", { class: "swatch square", style: { "--c": `var(--${colour})` } }),
    h("b", {}, words(event.event)),
    h("span", { class: "what" }, text(event)),
    h(
      "span",
      { class: "muted by" },
      [whose(event), isStepSaid(event) ? null : `step ${grouped(event.step)}`]
        .filter(Boolean)
        .join(", "),
    ),
    h("span", { class: "number cost" }, event.cost_s > 0 ? duration(event.cost_s) : ""),
  );
}

export default { name: "events", title: "Events", create };
