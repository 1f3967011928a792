// What a tired person wants to see in the first second: is it alive, is it healthy, when will it be done, what went wrong.

import { h, replace } from "./dom.js";
import {
  ago,
  clock,
  duration,
  grouped,
  interval,
  loss,
  money,
  number,
  percent,
  words as plain,
  NONE,
} from "./format.js";
import { stateMark } from "./runs.js";
import * as state from "./state.js";

const FAULTS = new Set([
  "worker_died",
  "server_died",
  "exchange_died",
  "follower_died",
  "killed",
  "hang",
  "stopped",
  "frozen",
  "stuck_loader",
  "mismatch",
  "straggler",
  "suspect",
  "slow_link",
  "oom_kill",
  "memory_low",
  "disk_failed",
  "disk_slow",
  "disk_full",
  "limit_near",
  "clock_jump",
  "bad_step",
  "bad_gradient",
  "rewind",
  "bad_shard",
  "block_damaged",
  "ledger_damaged",
  "store_unreachable",
  "corruption",
  "gradient_corrupt",
  "collective_corrupt",
  "replicas_differ",
  "save_failed",
  "memory_checkpoint_failed",
  "damaged_checkpoint",
  "coordinator_lost",
  "lease_lost",
  "node_refused",
  "node_slow",
  "writer_died",
  "drain_failed",
  "upkeep_failed",
  "replan_failed",
  "user_code_off",
  "sink_off",
  "alert",
  "alert_undelivered",
]);

/** What the strip and the marks on curves need to know of; the view Events asks for all. */
export const TOLD = [...FAULTS, "recovered", "resume", "migrated", "replan"].join(",");

export const isFault = (event) => FAULTS.has(event.event);

function cell(label, value, sub, extra = {}) {
  return h(
    "div",
    { class: `vital ${extra.tone ?? ""}`, "data-vital": label },
    h("dt", {}, label),
    h("dd", { class: "value" }, value),
    h("dd", { class: "sub", title: extra.title }, sub),
  );
}

function toView(view, ...text) {
  const go = (event) => {
    event.preventDefault();
    state.set({ view }, { step: true });
  };
  return h("a", { href: state.link({ view }), onclick: go }, text);
}

/** Draw the strip. run: the run's answer; advice and events: theirs, or null while they are not known. */
export function drawVitals(root, run, advice, events) {
  replace(
    root,
    h(
      "dl",
      { class: "vitals" },
      alive(run),
      health(run, advice, events),
      done(run, advice?.forecast),
      cost(run, advice?.forecast),
      speed(run),
    ),
    next(advice?.next),
    run.problems?.length
      ? h(
          "div",
          { class: "notice warn", role: "note" },
          run.problems.slice(0, 5).map((each) => h("p", {}, each)),
        )
      : null,
  );
}

function next(action) {
  if (!action || action.rule === "none") return null;
  return h("p", { class: "next" }, `Next: ${action.do} `, h("code", {}, action.command));
}

function alive(run) {
  const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : null;
  const step = `step ${grouped(run.step ?? 0)}${run.steps ? ` of ${grouped(run.steps)}, ${percent(share)}` : ""}`;
  return h(
    "div",
    { class: "vital alive", "data-vital": "State" },
    h("dt", {}, "State"),
    h("dd", { class: "value" }, stateMark(run.state)),
    share === null ? null : h("dd", {}, progress(share)),
    h("dd", { class: "sub" }, step, " · ", h("time", { "data-ago": run.updated_s }, ago(run.updated_s))),
  );
}

function progress(share) {
  const now = { "aria-valuenow": Math.round(100 * share), "aria-valuemin": 0, "aria-valuemax": 100 };
  const bar = h("i", { style: { width: `${100 * share}%` } });
  return h("div", { class: "progress", role: "progressbar", "aria-label": "Progress", ...now }, bar);
}

const isCritical = (alert) => alert.severity === "critical";

// A warning whose steps reach up to now: it still goes on.
const isLasting = (each, run) => each.severity === "warning" && each.steps?.[1] >= (run.step ?? 0) - 50;

const WORDS_OF_TROUBLE = { failed: "It failed", dead: "It is dead", silent: "No word from it" };

function health(run, advice, events) {
  if (run.state in WORDS_OF_TROUBLE) {
    const words = WORDS_OF_TROUBLE[run.state];
    return cell(
      "Health",
      h("span", { class: run.state === "silent" ? "warn" : "bad" }, words),
      toView("events", run.why ?? "Look at what happened last"),
      { tone: "raised", title: run.why },
    );
  }
  // What is over is told in the view Advice.
  const alerts = (advice?.alerts ?? []).filter((alert) => alert.state !== "ends");
  if (alerts.length) {
    const [worst] = [...alerts].sort((a, b) => isCritical(b) - isCritical(a) || (b.time_s ?? 0) - (a.time_s ?? 0));
    const words = h(
      "span",
      { class: isCritical(worst) ? "bad" : "warn" },
      `${alerts.length} alert${alerts.length > 1 ? "s" : ""}`,
    );
    return cell("Health", words, toView("advice", worst.why ?? worst.alert), { tone: "raised", title: worst.why });
  }
  const lasting = (advice?.advice ?? []).filter((each) => isLasting(each, run));
  if (lasting.length && run.state === "training") {
    const words = h("span", { class: "warn" }, `${lasting.length} warning${lasting.length > 1 ? "s" : ""}`);
    return cell("Health", words, toView("advice", lasting[0].title), { tone: "raised", title: lasting[0].title });
  }
  // "Healthy" is said of what was looked at only.
  if (!events || !advice) return cell("Health", NONE, "being looked at");
  if (events.failed || advice.failed) return cell("Health", NONE, "the server failed to look at it");
  const faults = events.events.filter(isFault);
  const last = faults.at(-1);
  if (!last) return cell("Health", h("span", { class: "good" }, "Healthy"), "nothing went wrong so far");
  const told = last.words ?? last.why ?? last.event;
  const link = toView("events", `${ago(last.time_s)}: ${told}`);
  if (run.state !== "training") return cell("Last trouble", plain(last.event), link, { title: told });
  return cell("Health", h("span", { class: "good" }, "Healthy again"), link, { title: told });
}

function done(run, forecast) {
  if (run.state === "finished")
    return cell("Done", clock(run.updated_s), run.started_s ? `took ${duration(run.updated_s - run.started_s)}` : "");
  if (run.state !== "training")
    return cell(
      "Done",
      NONE,
      run.state === "failed" ? "give the same command again to go on" : "it does not train now",
    );
  const [low, middle, high] = interval(forecast?.end_s);
  const sub = middle
    ? `at ${clock(middle)}${low && high ? `, between ${clock(low)} and ${clock(high)}` : ""}`
    : run.eta_s
      ? `at ${clock(Date.now() / 1000 + run.eta_s)}`
      : "not known yet";
  return cell("Done in", duration(run.eta_s ?? (middle ? middle - Date.now() / 1000 : null)), sub, { title: sub });
}

function cost(run, forecast) {
  const [low, middle, high] = interval(forecast?.cost);
  const currency = run.currency ?? forecast?.currency;
  const sub = middle
    ? `${money(middle, currency)} at the end${low !== undefined ? `, ${money(low)} to ${money(high)}` : ""}`
    : run.cost === null || run.cost === undefined
      ? "no price is known for this machine"
      : run.state === "finished"
        ? "in all"
        : "";
  return cell(run.state === "finished" ? "Cost" : "Cost so far", money(run.cost, currency), sub, { title: sub });
}

function speed(run) {
  const known = (value, text) => (value === null || value === undefined ? null : text);
  const parts = [
    known(run.tokens_per_s, `${number(run.tokens_per_s)} tokens/s`),
    known(run.mfu, `MFU ${percent(run.mfu, 1)}`),
    known(run.goodput, `goodput ${percent(run.goodput)}`),
  ];
  return cell("Loss", loss(run.loss), parts.filter(Boolean).join(", ") || "no step yet");
}
