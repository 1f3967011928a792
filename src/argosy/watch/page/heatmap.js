// A map of rows by columns on a canvas: an image of one pixel a cell, stretched. Thousands of rows cost no more than ten.

import { colour, rgb } from "./colours.js";
import { h, say } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

const LEFT = 58;
const BOTTOM = 22;
const MARKS = 16;
const RAMPS = {
  relative: ["heat-0", "heat-1", "heat-2", "heat-3", "heat-4"],
  even: ["even-0", "even-1", "even-2", "even-3"],
};

/** Colour of `share` (0 to 1) on a ramp, as [red, green, blue]. */
function onRamp(stops, share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return stops[low].map((value, i) => value + (stops[low + 1][i] - value) * (at - low));
}

export class HeatMap {
  /**
   * describe(row, column) -> lines of text for the cell under the pointer; select(firstRow, lastRow): the reader
   * pressed a row, or dragged over several.
   */
  constructor({ label, describe, select, height = 320 }) {
    Object.assign(this, { describe, select, height, cursor: null });
    this.canvas = h("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": label,
    });
    this.box = h("div", { class: "heat-box", hidden: true });
    this.element = h("div", { class: "heat" }, this.canvas, this.box);
    this.canvas.addEventListener("pointermove", (event) => this.#move(event));
    this.canvas.addEventListener("pointerleave", () => hideTip());
    this.canvas.addEventListener("pointerdown", (event) => this.#down(event));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => {
      hideTip();
      this.cursor = null;
      this.draw();
    });
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.element);
  }

  /**
   * drawn: {values[row][column] (null: nothing known), share(value, row, column) -> 0..1, ramp, rowNames, columnNames,
   * marks: [{row, from, to, colour}]}.
   */
  update(drawn) {
    this.drawn = drawn;
    this.draw();
  }

  draw() {
    if (!this.drawn || !this.element.clientWidth) return;
    const { values, rowNames, columnNames } = this.drawn;
    const rows = values.length;
    const columns = values[0]?.length ?? 0;
    const scale = window.devicePixelRatio || 1;
    const width = this.element.clientWidth;
    this.tall = Math.min(this.height, Math.max(64, rows * 26));
    this.canvas.width = width * scale;
    this.canvas.height = (this.tall + BOTTOM) * scale;
    this.canvas.style.height = `${this.tall + BOTTOM}px`;
    this.wide = Math.max(10, width - LEFT - MARKS);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    if (!rows || !columns) return;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#image(rows, columns), LEFT, 0, this.wide, this.tall);
    this.#labels(context, rowNames, columnNames);
    this.#marks(context, rows, columns);
  }

  #image(rows, columns) {
    const { values, share, ramp } = this.drawn;
    const stops = RAMPS[ramp].map(rgb);
    const empty = rgb("sunk");
    const image = new ImageData(columns, rows);
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const value = values[row][column];
        const shade = value === null || value === undefined ? empty : onRamp(stops, share(value, row, column));
        image.data.set([...shade, 255], 4 * (row * columns + column));
      }
    }
    const small = document.createElement("canvas");
    small.width = columns;
    small.height = rows;
    small.getContext("2d").putImageData(image, 0, 0);
    return small;
  }

  #labels(context, rowNames, columnNames) {
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil(rowNames.length / Math.floor(this.tall / 15));
    rowNames.forEach((name, row) => {
      // The first and the last are not cut at the edge.
      const y = Math.max(7, Math.min(this.tall - 7, ((row + 0.5) * this.tall) / rowNames.length));
      if (row % every === 0) context.fillText(fit(context, name, LEFT - 10), LEFT - 6, y);
    });
    context.textBaseline = "top";
    const wide = this.wide / columnNames.length;
    const stride = Math.ceil(70 / wide);
    columnNames.forEach((name, column) => {
      if (column % stride) return;
      // Over wide cells in the middle, over narrow ones at their left edge; nothing beyond the right end.
      context.textAlign = wide > 40 ? "center" : "left";
      const x = LEFT + (wide > 40 ? column + 0.5 : column) * wide;
      if (x + 30 < LEFT + this.wide + MARKS || wide > 40) context.fillText(name, x, this.tall + 6);
    });
  }

  // A mark frames its row from its first column on, and has an arrow at the edge, which is seen where cells are tiny.
  #marks(context, rows, columns) {
    for (const mark of this.drawn.marks ?? []) {
      const y = ((mark.row + 0.5) * this.tall) / rows;
      context.fillStyle = context.strokeStyle = colour(mark.colour);
      context.beginPath();
      context.moveTo(LEFT + this.wide + 3, y);
      context.lineTo(LEFT + this.wide + 11, y - 5);
      context.lineTo(LEFT + this.wide + 11, y + 5);
      context.fill();
      if (mark.from === null || mark.from === undefined) continue;
      const x = LEFT + (mark.from * this.wide) / columns;
      const tall = Math.max(5, this.tall / rows - 2);
      context.lineWidth = 1.5;
      context.strokeRect(x, y - tall / 2, Math.max(4, LEFT + ((mark.to + 1) * this.wide) / columns - x), tall);
    }
    if (this.cursor) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      const [wide, tall] = [this.wide / columns, this.tall / rows];
      context.strokeRect(LEFT + this.cursor[1] * wide, this.cursor[0] * tall, Math.max(3, wide), Math.max(3, tall));
    }
  }

  #cell(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left - LEFT, event.clientY - top];
    const { values } = this.drawn ?? { values: [] };
    if (!values.length || x < 0 || y < 0 || x >= this.wide || y >= this.tall) return null;
    return [Math.floor((y / this.tall) * values.length), Math.floor((x / this.wide) * values[0].length)];
  }

  #move(event) {
    const cell = this.#cell(event);
    if (this.from && cell) this.#box(this.from[0], cell[0]);
    if (!cell) return hideTip();
    showTip(this.describe(...cell), event.clientX, event.clientY);
  }

  #down(event) {
    this.from = this.#cell(event);
    if (!this.from || !this.select) return void (this.from = null);
    addEventListener(
      "pointerup",
      (end) => {
        const to = this.#cell(end);
        this.box.hidden = true;
        if (to && this.from) this.select(Math.min(this.from[0], to[0]), Math.max(this.from[0], to[0]));
        this.from = null;
      },
      { once: true },
    );
  }

  #box(first, last) {
    const tall = this.tall / this.drawn.values.length;
    this.box.hidden = first === last;
    this.box.style.top = `${Math.min(first, last) * tall}px`;
    this.box.style.height = `${(Math.abs(last - first) + 1) * tall}px`;
    this.box.style.left = `${LEFT}px`;
    this.box.style.width = `${this.wide}px`;
  }

  #key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const move = moves[event.key];
    const { values } = this.drawn ?? { values: [] };
    if (!move || !values.length) return;
    event.preventDefault();
    event.stopPropagation();
    const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
    const [row, column] = this.cursor ?? [-move[0], -move[1]];
    this.cursor = [clamp(row + move[0], values.length), clamp(column + move[1], values[0].length)];
    this.draw();
    const lines = this.describe(...this.cursor);
    const { left, top } = this.canvas.getBoundingClientRect();
    showTip(
      lines,
      left + LEFT + ((this.cursor[1] + 0.5) * this.wide) / values[0].length,
      top + ((this.cursor[0] + 0.5) * this.tall) / values.length,
    );
    say(lines.join(", "));
  }

  destroy() {
    this.watch.disconnect();
    hideTip();
  }
}

function fit(context, text, width) {
  let short = String(text);
  while (short.length > 2 && context.measureText(short).width > width) short = `${short.slice(0, -2)}…`;
  return short;
}

/** The bar that says what the colours mean: its two ends and what lies between. */
export function rampLegend(ramp, low, middle, high) {
  return h(
    "p",
    { class: `ramp ${ramp}` },
    h("span", {}, low),
    h("i", { "aria-hidden": "true" }),
    h("span", {}, high),
    middle ? h("span", { class: "muted" }, middle) : null,
  );
}
