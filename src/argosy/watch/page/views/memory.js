// Memory: what the plan said, what was measured, and of every rank.

import { ofRun } from "../api.js";
import { card, nothing, partsLegend, stackBar, table } from "../bars.js";
import { ofParts } from "../colours.js";
import { colour } from "../colours.js";
import { h, replace } from "../dom.js";
import { bytes, grouped, words } from "../format.js";
import { hideTip, showTip } from "../tip.js";

const EXACT = ["weights", "gradients", "optimizer"];

function create(root, page) {
  let answer = null;
  const ranks = new RankBars();
  const top = h("div", {});
  const bottom = card("By rank", ranks.element, ranks.words);
  replace(root, h("div", { class: "stack-of-cards" }, top, bottom));

  async function refresh(signal) {
    answer = await ofRun(page.primary(), "memory", {}, signal);
    replace(top, beside(answer));
    const by = answer.by_rank;
    bottom.hidden = !by?.bytes?.some((each) => each !== null);
    if (!bottom.hidden) ranks.update(by);
  }

  return { refresh, recolour: () => ranks.draw(), destroy: () => ranks.destroy() };
}

const sum = (parts) => parts.reduce((total, part) => total + (part.value ?? 0), 0);

function beside(answer) {
  const planned = Object.entries(answer.predicted ?? {}).filter(([, value]) => value > 0);
  const measured = Object.entries(answer.measured ?? {}).filter(([, value]) => value > 0);
  if (!planned.length && !measured.length)
    return nothing("No memory has been measured yet.", "The first line comes with the first step.");
  const colours = ofParts([...new Set([...planned, ...measured].map(([name]) => name))]);
  const partsOf = (list) => list.map(([name, value]) => ({ name: words(name), value, colour: colours.get(name) }));
  const [plan, got] = [partsOf(planned), partsOf(measured)];
  const [low, , high] = answer.predicted_total ?? [];
  const limits = (answer.by_rank?.limit_bytes ?? []).filter((each) => each > 0);
  const limit = limits.length ? Math.min(...limits) : null;
  const scale = Math.max(
    sum(plan),
    sum(got),
    high ?? 0,
    limit && limit < 4 * Math.max(sum(plan), sum(got)) ? limit : 0,
  );
  const mark = limit && limit <= scale ? { value: limit, title: `The device has ${bytes(limit)}` } : null;
  const names = [...new Set([...planned, ...measured].map(([name]) => name))];
  const rows = names.map((name) => {
    const [a, b] = [answer.predicted?.[name], answer.measured?.[name]];
    return [
      h(
        "span",
        { class: "run-name" },
        h("i", { class: "swatch square", style: { "--c": `var(--${colours.get(name)})` } }),
        words(name),
        EXACT.includes(name) ? h("span", { class: "muted" }, "exact") : null,
      ),
      bytes(a),
      bytes(b),
      a && b ? `${(b / a).toFixed(2)} ×` : "–",
    ];
  });
  const total = answer.measured_total ?? (got.length ? sum(got) : null);
  rows.push([
    h("b", {}, "in all"),
    bytes(plan.length ? sum(plan) : null),
    bytes(total),
    plan.length && total ? `${(total / sum(plan)).toFixed(2)} ×` : "–",
  ]);
  return card(
    "Of a rank, predicted beside measured",
    h(
      "div",
      { class: "pair tall" },
      h("span", {}, "plan"),
      stackBar(plan, scale, bytes, { label: "Plan:", mark }),
      h("span", {}, "measured"),
      stackBar(got, scale, bytes, { label: "Measured:", mark }),
    ),
    low
      ? h(
          "p",
          { class: "muted" },
          `The plan expects ${bytes(low)} to ${bytes(high)} (90 % interval).`,
          limit ? ` The device has ${bytes(limit)}.` : "",
        )
      : null,
    answer.before
      ? h("p", { class: "muted" }, `Python and torch held ${bytes(answer.before)} before the model was made.`)
      : null,
    got.length ? null : partsLegend(plan, bytes),
    table(
      [
        { text: "Category" },
        { text: "Plan", number: true },
        { text: "Measured", number: true },
        { text: "Ratio", number: true },
      ],
      rows,
      { caption: "Memory by category" },
    ),
  );
}

/** A bar for each rank on a canvas: thousands are no more work than ten. */
class RankBars {
  constructor() {
    this.canvas = h("canvas", { class: "rank-bars", role: "img" });
    this.element = h("div", { class: "heat" }, this.canvas);
    this.words = h("p", { class: "muted" });
    this.canvas.addEventListener("pointermove", (event) => this.#tip(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.element);
  }

  update(by) {
    this.by = by;
    const order = by.bytes.map((_, i) => i).sort((a, b) => (by.bytes[b] ?? 0) - (by.bytes[a] ?? 0));
    const [most, least] = [order[0], order.filter((i) => by.bytes[i] !== null).at(-1)];
    const isEven = bytes(by.bytes[most]) === bytes(by.bytes[least]);
    const text =
      by.bytes.length < 2
        ? ""
        : isEven
          ? `All ranks have ${bytes(by.bytes[most])}.`
          : `Rank ${this.#rank(most)} has most, ${bytes(by.bytes[most])}; rank ${this.#rank(least)} least, ${bytes(by.bytes[least])}.`;
    this.words.textContent = text;
    this.canvas.setAttribute("aria-label", `Memory of ${by.bytes.length} ranks. ${text}`);
    this.draw();
  }

  #rank(i) {
    const rank = this.by.ranks[i];
    return Array.isArray(rank) ? `${grouped(rank[0])} to ${grouped(rank[1])}` : grouped(rank);
  }

  draw() {
    if (!this.by || !this.element.clientWidth) return;
    const scale = devicePixelRatio || 1;
    const [width, height, foot] = [this.element.clientWidth, 150, 20];
    this.canvas.width = width * scale;
    this.canvas.height = (height + foot) * scale;
    this.canvas.style.height = `${height + foot}px`;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    const { bytes: values } = this.by;
    const most = Math.max(...values.map((value) => value ?? 0)) * 1.05 || 1;
    const wide = Math.min(48, width / values.length);
    this.wide = wide;
    context.fillStyle = colour("part-b");
    values.forEach((value, i) => {
      const tall = ((value ?? 0) / most) * height;
      context.fillRect(i * wide, height - tall, Math.max(0.5, wide - (wide > 4 ? 2 : 0)), tall);
    });
    context.fillStyle = colour("line-strong");
    context.fillRect(0, height, width, 1);
    context.fillStyle = colour("muted");
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const every = Math.ceil(values.length / Math.max(1, Math.floor((values.length * wide) / 60)));
    values.forEach((_, i) => {
      if (i % every === 0) context.fillText(this.#rank(i), i * wide + 2, height + 14);
    });
  }

  #tip(event) {
    const at = Math.floor((event.clientX - this.canvas.getBoundingClientRect().left) / this.wide);
    if (!this.by || at < 0 || at >= this.by.bytes.length) return hideTip();
    showTip(
      [`Rank ${this.#rank(at)}`, this.by.nodes?.[at] ? `on ${this.by.nodes[at]}` : "", bytes(this.by.bytes[at])].filter(
        Boolean,
      ),
      event.clientX,
      event.clientY,
    );
  }

  destroy() {
    this.watch.disconnect();
    hideTip();
  }
}

export default { name: "memory", title: "Memory", create };
