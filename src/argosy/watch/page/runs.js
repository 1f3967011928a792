// The list of runs: a table where nothing is chosen, and a column beside what is.

import { h, replace } from "./dom.js";
import { ago, clock, duration, grouped, loss, money, number, percent } from "./format.js";
import { sparkline } from "./sparkline.js";
import * as state from "./state.js";

export const STATES = {
  training: ["good", "training"],
  finished: ["done", "finished"],
  stopped: ["idle", "stopped"],
  failed: ["bad", "failed"],
  silent: ["warn", "silent"],
  dead: ["bad", "dead"],
  unreadable: ["bad", "cannot be read"],
};

/** A dot and a word: never a colour alone. */
export function stateMark(name) {
  const [tone, word] = STATES[name] ?? ["idle", name ?? "unknown"];
  return h("span", { class: `status ${tone}` }, h("i", { "aria-hidden": "true" }), word);
}

export const progressText = (run) => {
  const count = Math.max(run.step ?? 0, run.steps ?? 0) >= 1e5 ? number : grouped;
  return run.steps ? `${count(run.step ?? 0)} / ${count(run.steps)}` : count(run.step ?? 0);
};
const named = (run) => run.label || run.name || run.id;

/** The runs, each with the label that it is called by: its name, and where several have the same, its folder too. */
export function labelled(runs) {
  const count = new Map();
  for (const { name } of runs) count.set(name, (count.get(name) ?? 0) + 1);
  return runs.map((run) => ({ ...run, label: count.get(run.name) > 1 ? withFolder(run) : run.name || run.id }));
}

const withFolder = ({ name, id }) => (id.split("/").at(-1) === name ? id : `${name} (${id})`);

const COLUMNS = [
  ["name", "Run", (run) => named(run)],
  ["state", "State", (run) => run.state],
  ["loss", "Loss", (run) => run.loss],
  ["validation_loss", "Validation", (run) => run.validation_loss],
  ["step", "Step", (run) => run.step],
  ["tokens_per_s", "Tokens/s", (run) => run.tokens_per_s],
  ["mfu", "MFU", (run) => run.mfu],
  ["eta_s", "Left", (run) => run.eta_s],
  ["cost", "Cost", (run) => run.cost],
  ["updated_s", "Updated", (run) => run.updated_s],
];
const LIVELY = ["training", "silent", "dead", "failed", "stopped", "finished"];

function sorted(runs, sort) {
  const [key, down] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
  const value = COLUMNS.find(([name]) => name === key)?.[2] ?? COLUMNS[9][2];
  const rank = (run) => (key === "state" ? LIVELY.indexOf(run.state) : value(run));
  return [...runs].sort((a, b) => {
    const [x, y] = [rank(a), rank(b)];
    const without = (each) => each === null || each === undefined;
    if (without(x) || without(y)) return without(x) - without(y);
    return (typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y) * down;
  });
}

const matches = (run, text) =>
  text
    .toLowerCase()
    .split(/\s+/)
    .every((word) => `${run.id} ${named(run)} ${run.state} ${run.plan ?? ""}`.toLowerCase().includes(word));

/** The page without a chosen run: all of them, in a table. */
export class RunTable {
  constructor(root) {
    this.filter = h("input", {
      type: "search",
      placeholder: "Filter by name, state or plan",
      "aria-label": "Filter the runs",
      class: "filter",
      oninput: () => this.#draw(),
    });
    this.compare = h(
      "button",
      {
        type: "button",
        class: "primary",
        disabled: true,
        onclick: () => state.set({ run: [...this.chosen], view: undefined }, { step: true }),
      },
      "Compare",
    );
    this.counts = h("p", { class: "muted" });
    this.body = h("div", {});
    this.chosen = new Set();
    replace(
      root,
      h(
        "div",
        { class: "head" },
        h("div", {}, h("h1", {}, "Runs"), this.counts),
        h("span", { class: "grow" }),
        this.filter,
        this.compare,
      ),
      this.body,
    );
  }

  update(runs) {
    this.runs = runs;
    this.#draw();
  }

  focusFilter() {
    this.filter.focus();
  }

  #draw() {
    if (!this.runs) return;
    const count = (name) => this.runs.filter((run) => run.state === name).length;
    const tally = LIVELY
      .filter(count)
      .map((name) => `${count(name)} ${name}`);
    this.counts.textContent = tally.join(" · ");
    if (!this.runs.length) {
      return replace(
        this.body,
        h(
          "p",
          { class: "state" },
          "There are no runs in this folder yet.",
          h(
            "span",
            { class: "more" },
            "Start one with ",
            h("code", {}, "argosy train"),
            "; it shows up here by itself.",
          ),
        ),
      );
    }
    const shown = sorted(
      this.runs.filter((run) => matches(run, this.filter.value)),
      state.get().sort ?? "state",
    );
    this.compare.disabled = this.chosen.size < 2;
    this.compare.textContent = this.chosen.size > 1 ? `Compare ${this.chosen.size}` : "Compare";
    if (!shown.length) return replace(this.body, h("p", { class: "state" }, "No run matches the filter."));
    const focused = document.activeElement?.dataset?.focus;
    replace(
      this.body,
      h(
        "div",
        { class: "frame runs-frame" },
        h(
          "table",
          { class: "runs" },
          this.#head(),
          h(
            "tbody",
            {},
            shown.map((run) => this.#row(run)),
          ),
        ),
      ),
    );
    if (focused) this.body.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }

  #head() {
    const sort = state.get().sort ?? "state";
    const cell = ([key, title]) => {
      const ascending = sort === key;
      const order = ascending ? "ascending" : sort === `-${key}` ? "descending" : null;
      const next = ascending ? `-${key}` : key;
      const turn = () => (state.set({ sort: next }), this.#draw());
      return h(
        "th",
        { scope: "col", "aria-sort": order, class: ["name", "state"].includes(key) ? `of-${key}` : "number" },
        h("button", { type: "button", class: "sort", "data-focus": `sort ${key}`, onclick: turn }, title),
      );
    };
    const cells = COLUMNS.map(cell);
    cells.splice(2, 0, h("th", { scope: "col", class: "curve" }, "Loss so far"));
    return h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "unseen" }, "Compare")), cells));
  }

  #row(run) {
    const tick = (event) => {
      this.chosen[event.target.checked ? "add" : "delete"](run.id);
      this.#draw();
    };
    const open = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      state.set({ run: [run.id], view: undefined }, { step: true });
    };
    const number_ = (text, label, extra = "") => h("td", { class: `number ${extra}`, "data-label": label }, text);
    return h(
      "tr",
      { "data-run": run.id },
      h(
        "td",
        { class: "tick" },
        h("input", {
          type: "checkbox",
          "aria-label": `Compare ${named(run)}`,
          checked: this.chosen.has(run.id),
          onchange: tick,
          "data-focus": `tick ${run.id}`,
        }),
      ),
      h(
        "td",
        { class: "name" },
        h("a", { href: state.link({ run: [run.id] }), onclick: open, "data-focus": `open ${run.id}` }, named(run)),
        h("span", { class: "sub" }, run.name && run.id !== run.name && run.id !== "." ? run.id : (run.plan ?? "")),
      ),
      h(
        "td",
        { class: "state-cell" },
        stateMark(run.state),
        run.why ? h("span", { class: "sub", title: run.why }, run.why) : null,
      ),
      h("td", { class: "curve" }, sparkline(run.spark, { width: 110 })),
      number_(loss(run.loss), "loss"),
      number_(loss(run.validation_loss), "validation"),
      number_(progressText(run), "step"),
      number_(number(run.tokens_per_s), "tokens/s"),
      number_(percent(run.mfu, 1), "MFU"),
      number_(run.state === "training" ? duration(run.eta_s) : "–", "left"),
      number_(money(run.cost, run.currency), "cost"),
      number_(h("time", { title: clock(run.updated_s, true) }, ago(run.updated_s)), "updated", "muted"),
    );
  }
}

/** The column beside a run: choose another, or more of them. */
export class RunList {
  constructor(root, colourOf) {
    this.colourOf = colourOf;
    this.filter = h("input", {
      type: "search",
      placeholder: "Filter runs",
      "aria-label": "Filter the runs",
      class: "filter",
      oninput: () => this.#draw(),
    });
    this.list = h("ul", { class: "run-list" });
    replace(
      root,
      h(
        "div",
        { class: "side-head" },
        this.filter,
        h("p", { class: "muted hint" }, "Tick several to compare their curves."),
      ),
      this.list,
    );
  }

  update(runs, chosen) {
    this.runs = runs;
    this.chosen = chosen;
    this.#draw();
  }

  focusFilter() {
    this.filter.focus();
  }

  #draw() {
    const focused = document.activeElement?.dataset?.focus;
    const shown = sorted(
      (this.runs ?? []).filter((run) => matches(run, this.filter.value)),
      "state",
    );
    replace(
      this.list,
      shown.map((run) => this.#item(run)),
      shown.length ? null : h("li", { class: "muted empty" }, "No run matches."),
    );
    if (focused) this.list.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  }

  #item(run) {
    const on = this.chosen.includes(run.id);
    const only = on && this.chosen.length === 1;
    const tick = () => {
      const next = on ? this.chosen.filter((id) => id !== run.id) : [...this.chosen, run.id];
      if (next.length) state.set({ run: next }, { step: true });
      else this.#draw();
    };
    const open = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      state.set({ run: [run.id], from: undefined, to: undefined }, { step: true });
      document.body.classList.remove("drawer");
    };
    const tone = this.colourOf(run.id);
    return h(
      "li",
      { class: on ? "chosen" : null, style: { "--c": `var(--${tone})` } },
      h("input", {
        type: "checkbox",
        "aria-label": `Show ${named(run)}`,
        checked: on,
        onchange: tick,
        "data-focus": `tick ${run.id}`,
      }),
      h(
        "a",
        {
          href: state.link({ run: [run.id] }),
          "aria-current": only ? "true" : null,
          onclick: open,
          "data-focus": `open ${run.id}`,
          title: run.id,
        },
        h("span", { class: "name" }, named(run)),
        h("span", { class: "sub" }, stateMark(run.state), h("span", {}, progressText(run))),
      ),
      sparkline(run.spark, { width: 54, height: 26, colour: on ? tone : "muted" }),
    );
  }
}
