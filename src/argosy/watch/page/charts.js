// A chart in a card: title, legend with the values under the cursor, downloads, zoom by drag, keyboard.
// uPlot draws; the server has already thinned what is drawn to about a point a pixel.

import { axesOf, drawBad, drawMarks, drawSpikes, scalesOf } from "./chart_axes.js";
import { linesOf, stackOf } from "./chart_data.js";
import { colour } from "./colours.js";
import { csv, nearest } from "./curves.js";
import { h, icon, replace, say } from "./dom.js";
import { saveText, savePicture } from "./download.js";
import { clock, grouped, number } from "./format.js";

const uPlot = window.uPlot;

export class Chart {
  /**
   * format: how values are written. kind: "lines" or "stack". zoom(from, to): the reader chose a range; reset(): all
   * again. isTime: x is seconds since 1970 rather than steps. group: charts that share their cursor.
   */
  constructor({
    title,
    format = number,
    height = 190,
    kind = "lines",
    zoom,
    reset,
    axis = format,
    isTime = false,
    group = "steps",
  }) {
    Object.assign(this, { title, format, axis, height, kind, zoom, reset, isTime, group });
    this.x = isTime ? (time) => clock(time, true) : grouped;
    this.xName = isTime ? "time" : "step";
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
      this.note.textContent = bad
        ? "No finite value in this range: all are NaN or infinite."
        : "No values in this range.";
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
    this.plot?.setScale("x", { min: this.drawn.logX ? Math.max(1, from) : from, max: to });
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
    savePicture(
      `${this.drawn.series[0]?.run ?? legend[0]?.[0] ?? ""}-${this.title}`,
      this.plot.ctx.canvas,
      this.title,
      legend,
    );
  }

  #clear() {
    this.plot?.destroy();
    this.plot = null;
  }

  #window(steps) {
    let [from, to] = this.drawn.window ?? [steps[0], steps.at(-1)];
    // A logarithmic axis has no zero.
    if (this.drawn.logX) from = Math.max(1, from);
    return { min: from, max: to > from ? to : from + 1 };
  }

  #options(lines, bands) {
    // A cursor over one chart shows in all of its group; a choice of steps does not, or each would ask.
    const filters = { pub: (type) => type === "mousemove" || type === "mouseleave", sub: () => true };
    return {
      width: this.place.clientWidth || 400,
      height: this.height,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      scales: scalesOf(this, this.drawn),
      axes: axesOf(this, this.drawn),
      series: [{}, ...lines.map((line) => line.options)],
      bands,
      cursor: {
        sync: { key: this.group, scales: ["x", null], filters },
        drag: { x: Boolean(this.zoom), y: false, setScale: false },
        points: {
          size: 6,
          fill: (plot, i) => plot.series[i].stroke?.(plot, i) ?? "transparent",
          show: (plot, i) => lines[i - 1]?.named && this.kind === "lines",
        },
        dataIdx: (plot, i, index) => (i === 0 ? index : (nearest(plot.data[i], index) ?? index)),
        bind: { dblclick: () => () => (this.reset?.(), null) },
      },
      hooks: {
        setCursor: [(plot) => this.#values(plot.cursor.left >= 0 ? plot.cursor.idxs : null)],
        setSelect: [(plot) => this.#select(plot)],
        draw: [
          (plot) => drawMarks(plot, this.drawn.marks ?? []),
          (plot) => drawBad(plot, this.drawn.series),
          drawSpikes,
        ],
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
    replace(
      this.legend,
      step === null || step === undefined
        ? null
        : h("li", { class: "at" }, this.isTime ? this.x(step) : `step ${this.x(step)}`),
      items,
    );
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
      const wanted = { Home: 0, End: steps.length - 1 }[event.key] ?? now + move;
      const at = Math.max(0, Math.min(steps.length - 1, wanted));
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
