// A chart in a card: title, legend with the values under the cursor, downloads, zoom by drag, keyboard.
// uPlot draws; the server has already thinned what is drawn to about a point a pixel.

import { colour, faint } from "./colours.js";
import { csv, extent, nearest, smooth, stacked, ticks } from "./curves.js";
import { h, icon, replace, say } from "./dom.js";
import { saveText, savePicture } from "./download.js";
import { grouped, number } from "./format.js";

const uPlot = window.uPlot;
const BANDS_UP_TO = 4; // with more runs, bands between least and greatest hide each other

export class Chart {
  /**
   * format: how values are written. kind: "lines" or "stack". zoom(from, to): the reader chose a range; reset(): all
   * again. x: how places on the x axis are written; steps without it.
   */
  constructor({ title, format = number, height = 190, kind = "lines", zoom, reset, axis = format, x = grouped, xName = "step", group = "steps" }) {
    Object.assign(this, { title, format, axis, height, kind, zoom, reset, x, xName, group });
    this.plot = null;
    this.drawn = null;
    this.legend = h("ul", { class: "legend" });
    this.place = h("div", { class: "plot", tabindex: "0", role: "group", onkeydown: (event) => this.#key(event) });
    this.note = h("p", { class: "state", hidden: true });
    this.heading = h("h3", {}, title);
    this.element = h(
      "section",
      { class: `card chart ${kind}`, "data-chart": title },
      h(
        "header",
        {},
        this.heading,
        this.legend,
        h(
          "span",
          { class: "tools" },
          button("picture", `PNG of ${title}`, () => this.savePicture()),
          button("download", `CSV of ${title}`, () => this.saveCsv()),
        ),
      ),
      this.place,
      this.note,
    );
    this.place.style.height = `${height}px`;
    this.watch = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height }));
    this.watch.observe(this.place);
  }

  /** drawn: {series: [{name, colour, step, mean, min?, max?, dash?, points?}], window: [from, to], marks, logX, logY, smooth}. */
  update(drawn) {
    this.drawn = drawn;
    const series = drawn.series.filter((each) => each.step.length);
    const empty = !series.some((each) => each.mean.some((value) => value !== null && value !== undefined));
    this.note.hidden = !empty;
    this.place.hidden = empty;
    if (empty) {
      const bad = series.some((each) => each.bad?.length);
      this.note.textContent = bad ? "No finite value in this range: all are NaN or infinite." : "No values in this range.";
      replace(this.legend);
      return this.#clear();
    }
    const { data, lines, bands, shape } = this.kind === "stack" ? stackOf(series, drawn) : linesOf(series, drawn);
    const whole = JSON.stringify([shape, drawn.logX, drawn.logY, bands.length]);
    if (!this.plot || this.shape !== whole) {
      this.#clear();
      this.shape = whole;
      this.lines = lines;
      this.plot = new uPlot(this.#options(lines, bands), data, this.place);
    } else {
      this.lines = lines;
      this.plot.setData(data, false);
      this.plot.batch(() => this.plot.setScale("x", this.#window(data[0])));
    }
    this.#label();
    this.#values(null);
  }

  /** Move to a window before the server's points for it have come. */
  show(from, to) {
    this.plot?.setScale("x", { min: from, max: to });
  }

  /** Say what is wrong in the place of the curves. */
  fail(message) {
    this.#clear();
    this.place.hidden = true;
    this.note.hidden = false;
    this.note.textContent = message;
  }

  /** Draw anew in the colours of now. */
  recolour() {
    this.#clear();
    if (this.drawn) this.update(this.drawn);
  }

  destroy() {
    this.watch.disconnect();
    this.#clear();
  }

  saveCsv() {
    const series = this.drawn?.series ?? [];
    const head = ["run", this.xName, this.title, "least", "greatest"];
    const rows = series.flatMap((each) =>
      each.step.map((step, i) => [each.name, step, each.mean[i], each.min?.[i], each.max?.[i]]),
    );
    saveText(`${series[0]?.run ?? series[0]?.name ?? ""}-${this.title}`, "csv", csv(head, rows));
  }

  savePicture() {
    if (!this.plot) return;
    const legend = (this.drawn?.series ?? []).map((each) => [each.name, colour(each.colour)]);
    savePicture(`${this.drawn.series[0]?.run ?? legend[0]?.[0] ?? ""}-${this.title}`, this.plot.ctx.canvas, this.title, legend);
  }

  #clear() {
    this.plot?.destroy();
    this.plot = null;
  }

  #window(steps) {
    const [from, to] = this.drawn.window ?? [steps[0], steps.at(-1)];
    return { min: from, max: to > from ? to : from + 1 };
  }

  #options(lines, bands) {
    const { logX, logY } = this.drawn;
    const axis = { stroke: colour("muted"), font: `11px ${getComputedStyle(document.body).fontFamily}`, ticks: { show: false } };
    const grid = { stroke: colour("line"), width: 1 };
    const wide = this.place.clientWidth || 400;
    return {
      width: wide,
      height: this.height,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: (plot, low, high) => (high > low ? [low, high] : [low, low + 1]) },
        y: logY ? { distr: 3, range: (plot, low, high) => logRange(low, high) } : { range: (plot, low, high) => yRange(low, high, this.kind) },
      },
      axes: [
        { ...axis, grid: { ...grid, show: false }, size: 20, gap: 4, space: 70, values: (plot, at) => at.map((each) => (each === null ? "" : this.x(each))), ...(logX ? sparse : {}) },
        { ...axis, grid, size: (plot, values) => sizeOf(plot, values), gap: 6, space: 32, values: (plot, at) => at.map((each) => (each === null ? "" : this.axis(each))), ...(logY ? between : {}) },
      ],
      series: [{}, ...lines.map((line) => line.options)],
      bands,
      cursor: {
        sync: { key: this.group, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave", sub: () => true } },
        drag: { x: Boolean(this.zoom), y: false, setScale: false },
        points: { size: 6, fill: (plot, i) => plot.series[i].stroke?.(plot, i) ?? "transparent", show: (plot, i) => lines[i - 1]?.named && this.kind === "lines" },
        dataIdx: (plot, i, index) => (i === 0 ? index : (nearest(plot.data[i], index) ?? index)),
        bind: { dblclick: () => () => (this.reset?.(), null) },
      },
      hooks: {
        setCursor: [(plot) => this.#values(plot.cursor.left >= 0 ? plot.cursor.idxs : null)],
        setSelect: [(plot) => this.#select(plot)],
        draw: [(plot) => drawMarks(plot, this.drawn.marks ?? []), (plot) => drawBad(plot, this.drawn.series)],
      },
    };
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoom?.(plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
  }

  // The legend shows what is under the cursor, else the newest value.
  #values(indexes) {
    if (!this.plot) return;
    const named = this.lines.map((line, i) => ({ ...line, at: i + 1 })).filter((line) => line.named);
    const step = indexes ? this.plot.data[0][indexes[0]] : null;
    const items = named.map((line) => {
      const column = this.plot.data[line.at];
      const at = indexes ? indexes[line.at] : nearest(column, column.length - 1, column.length);
      const value = at === null || at === undefined ? null : line.value ? line.value(at) : column[at];
      return h(
        "li",
        { title: line.named },
        h("i", { class: line.dash ? "swatch dashed" : "swatch", style: { "--c": `var(--${line.colour})` } }),
        line.named === this.title ? null : h("span", { class: "name" }, line.named),
        h("b", {}, this.format(value)),
      );
    });
    if (this.kind === "stack") items.reverse();
    this.element.classList.toggle("many", named.length > 2);
    replace(this.legend, step === null || step === undefined ? null : h("li", { class: "at" }, `${this.xName} ${this.x(step)}`), items);
  }

  #label() {
    const parts = this.drawn.series.map((each) => {
      const last = nearest(each.mean, each.mean.length - 1, each.mean.length);
      const first = each.mean.findIndex((value) => value !== null && value !== undefined);
      if (last === null || first < 0) return `${each.name}: no value`;
      return `${each.name}: ${this.format(each.mean[first])} at ${this.x(each.step[first])}, ${this.format(each.mean[last])} at ${this.x(each.step[last])}`;
    });
    this.place.setAttribute("aria-label", `${this.title}. ${parts.join(". ")}`);
  }

  #key(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = this.plot.data[0];
    const { min, max } = this.plot.scales.x;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (move !== undefined || event.key === "Home" || event.key === "End") {
      const now = this.plot.cursor.idx ?? (move > 0 ? -1 : steps.length);
      const at = event.key === "Home" ? 0 : event.key === "End" ? steps.length - 1 : Math.max(0, Math.min(steps.length - 1, now + move));
      const left = this.plot.valToPos(steps[at], "x");
      this.plot.setCursor({ left, top: this.plot.over.clientHeight / 2 }, true, true);
      say(this.legend.textContent.trim());
    } else if ((event.key === "+" || event.key === "-") && this.zoom) {
      const centre = steps[this.plot.cursor.idx] ?? (min + max) / 2;
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      this.zoom(centre - half, centre + half);
    } else if (event.key === "0" && this.reset) this.reset();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

function button(name, label, onclick) {
  return h("button", { type: "button", class: "tool", "aria-label": label, title: label, onclick }, icon(name));
}

// Several runs have steps of their own: one x for all, where a run without a value there is not a gap in its line.
function linesOf(series, { smooth: factor = 0, logX, logY }) {
  const tables = [];
  const lines = [];
  const bands = [];
  const width = window.devicePixelRatio > 1 ? 1.5 : 1.4;
  for (const each of series) {
    const clean = (values) => values.map((value) => (value === undefined || (logY && value <= 0) ? null : value));
    const keep = logX ? each.step.map((step) => step > 0) : null;
    const cut = (values) => (keep ? values.filter((_, i) => keep[i]) : values);
    const columns = [];
    const add = (values, line, options) => {
      columns.push(cut(clean(values)));
      lines.push({ ...line, colour: each.colour, dash: each.dash, options: { scale: "y", points: { show: false }, ...options } });
    };
    const stroke = () => colour(each.colour);
    const spread = each.min && each.max && series.length <= BANDS_UP_TO && each.mean.some((v, i) => each.max[i] > each.min[i]);
    if (spread && !factor) {
      add(each.max, {}, { stroke: () => "transparent", width: 0 });
      add(each.min, {}, { stroke: () => "transparent", width: 0 });
      bands.push({ series: [lines.length - 1, lines.length], fill: () => faint(each.colour, 0.16) });
    }
    if (factor > 0 && !each.points) add(each.mean, {}, { stroke: () => faint(each.colour, 0.28), width: 1 });
    add(
      each.points ? each.mean : smooth(each.mean, factor),
      { named: each.name },
      { stroke, width, dash: each.dash, points: each.points || each.mean.length < 3 ? { show: true, size: 5, fill: stroke } : { show: false } },
    );
    tables.push([cut(each.step), ...columns]);
  }
  // What lies alone between two gaps is drawn as well: a single value is a value.
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map((table) => table.map(() => 2)));
  return { data, lines, bands, shape: [lines.map((line) => [line.named, line.colour, line.options.points.show])] };
}

// From the whole down, each area over the one before: opaque, so that colours are those of the legend.
function stackOf(series) {
  const sums = stacked(series.map((each) => each.mean));
  const order = series.map((each, i) => ({ each, sum: sums[i] })).reverse();
  const lines = order.map(({ each }) => ({
    named: each.name,
    colour: each.colour,
    value: (at) => each.mean[at],
    options: { scale: "y", points: { show: false }, stroke: () => colour(each.colour), width: 0, fill: () => colour(each.colour) },
  }));
  return { data: [series[0].step, ...order.map(({ sum }) => sum)], lines, bands: [], shape: series.map((each) => each.name) };
}

function yRange(low, high, kind) {
  if (low === null || high === null) return [0, 1];
  if (kind === "stack") return [0, high * 1.05 || 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  // What cannot be negative does not begin below zero.
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function logRange(low, high) {
  if (!(low > 0) || !(high > 0)) return [0.1, 1];
  return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
}

// Within a decade or two a logarithmic axis has round places too, which uPlot would leave without a word.
const between = {
  splits: (plot, i, low, high) => {
    if (high / low < 30) return ticks(low, high, 4);
    const decades = [];
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++) decades.push(10 ** power);
    return decades;
  },
  filter: (plot, splits) => splits,
};
const sparse = {
  splits: (plot, i, low, high) => [1, 2, 5].flatMap((m) => [...Array(12).keys()].map((p) => m * 10 ** p)).sort((a, b) => a - b).filter((at) => at >= low && at <= high),
  filter: (plot, splits) => splits.map((at) => (splits.length > 8 && Math.log10(at) % 1 !== 0 ? null : at)),
};

function sizeOf(plot, values) {
  if (!values?.length) return 44;
  const longest = values.reduce((a, b) => (String(b).length > a.length ? String(b) : a), "");
  return Math.max(44, Math.ceil(longest.length * 6.3) + 14);
}

/** Events on the curve: a thin line each, in the colour of its kind. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of marks) {
    if (mark.step < plot.scales.x.min || mark.step > plot.scales.x.max) continue;
    const x = Math.round(plot.valToPos(mark.step, "x", true));
    ctx.strokeStyle = colour(mark.colour);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillStyle = colour(mark.colour);
    ctx.beginPath();
    ctx.arc(x, bbox.top + 2 * devicePixelRatio, 3 * devicePixelRatio, 0, 7);
    ctx.fill();
  }
  ctx.restore();
}

/** Steps whose value was NaN or infinite: a red triangle at the foot, since a curve can only leave them out. */
function drawBad(plot, series) {
  const { ctx, bbox } = plot;
  const size = 4 * devicePixelRatio;
  ctx.save();
  ctx.fillStyle = colour("bad");
  for (const step of series.flatMap((each) => each.bad ?? [])) {
    if (step < plot.scales.x.min || step > plot.scales.x.max) continue;
    const x = plot.valToPos(step, "x", true);
    const foot = bbox.top + bbox.height;
    ctx.beginPath();
    ctx.moveTo(x, foot - 2 * size);
    ctx.lineTo(x + size, foot);
    ctx.lineTo(x - size, foot);
    ctx.fill();
  }
  ctx.restore();
}

/** The x values that series cover together; null without any. */
export const range = (series) => extent(series.map((each) => each.step));
