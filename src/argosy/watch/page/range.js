// The whole run in a strip, and the window of it that the charts show: drag to choose, drag the window to scroll.

import { h, icon, replace } from "./dom.js";
import { grouped } from "./format.js";
import { sparkline } from "./sparkline.js";

const EDGE_PX = 9;

export class RangeBar {
  /** move(from, to): while it is dragged; choose(from, to): when it is let go; all(): the whole run. */
  constructor({ move, choose, all }) {
    Object.assign(this, { move, choose });
    this.picture = h("div", { class: "range-picture" });
    this.window = h("div", {
      class: "range-window",
      tabindex: "0",
      role: "slider",
      "aria-label": "Steps shown",
      onkeydown: (event) => this.#key(event),
    });
    this.strip = h("div", { class: "range-strip" }, this.picture, this.window);
    this.text = h("output", { class: "range-text" });
    this.reset = h("button", { type: "button", class: "quiet", onclick: all }, icon("reset"), "All steps");
    this.element = h("div", { class: "range" }, this.strip, this.text, this.reset);
    this.strip.addEventListener("pointerdown", (event) => this.#down(event));
  }

  /** whole: [first, last] step; shown: the window, null for all; values: the curve in the strip. */
  update(whole, shown, values) {
    this.whole = whole;
    this.shown = shown;
    if (values && values !== this.values) {
      this.values = values;
      replace(this.picture, sparkline(values, { width: 600, height: 30, colour: "muted" }));
    }
    this.#place();
  }

  #place() {
    const [first, last] = this.whole;
    const [from, to] = this.shown ?? this.whole;
    const share = (step) => Math.max(0, Math.min(1, (step - first) / Math.max(1, last - first)));
    this.window.style.left = `${100 * share(from)}%`;
    this.window.style.right = `${100 * (1 - share(to))}%`;
    this.window.classList.toggle("whole", !this.shown);
    this.text.textContent = `steps ${grouped(from)} to ${grouped(to)}`;
    this.reset.hidden = !this.shown;
    this.window.setAttribute("aria-valuemin", first);
    this.window.setAttribute("aria-valuemax", last);
    this.window.setAttribute("aria-valuenow", Math.round(from));
    this.window.setAttribute("aria-valuetext", this.text.textContent);
  }

  #down(event) {
    if (event.button) return;
    event.preventDefault();
    this.window.focus({ preventScroll: true });
    this.strip.setPointerCapture(event.pointerId);
    const { left, width } = this.strip.getBoundingClientRect();
    const [first, last] = this.whole;
    const step = (x) => first + ((x - left) / width) * (last - first);
    const inside = this.window.getBoundingClientRect();
    const began = { at: step(event.clientX), shown: this.shown ? [...this.shown] : null };
    const near = (edge) => this.shown && Math.abs(event.clientX - edge) < EDGE_PX;
    const how = near(inside.left)
      ? "from"
      : near(inside.right)
        ? "to"
        : this.shown && event.clientX > inside.left && event.clientX < inside.right
          ? "both"
          : "new";
    const drag = (now) => {
      this.shown = this.#dragged(how, began, step(now.clientX));
      this.#place();
      this.move(...this.shown);
    };
    const end = () => {
      this.strip.removeEventListener("pointermove", drag);
      if (this.shown && this.shown[1] - this.shown[0] >= 1) this.choose(...this.shown);
    };
    this.strip.addEventListener("pointermove", drag);
    this.strip.addEventListener("pointerup", end, { once: true });
    this.strip.addEventListener("pointercancel", end, { once: true });
  }

  #dragged(how, began, at) {
    const [first, last] = this.whole;
    const clamp = (value) => Math.max(first, Math.min(last, value));
    if (how === "new") return [clamp(Math.min(began.at, at)), clamp(Math.max(began.at, at))];
    const [from, to] = began.shown;
    if (how === "from") return [clamp(Math.min(at, to - 1)), to];
    if (how === "to") return [from, clamp(Math.max(at, from + 1))];
    const by = Math.max(first - from, Math.min(last - to, at - began.at));
    return [from + by, to + by];
  }

  #key(event) {
    const [first, last] = this.whole;
    const [from, to] = this.shown ?? this.whole;
    const size = to - from;
    const by = { ArrowLeft: -0.1, ArrowRight: 0.1, PageUp: -1, PageDown: 1, Home: -Infinity, End: Infinity }[event.key];
    let next = null;
    if (by !== undefined) {
      const moved = Math.max(first - from, Math.min(last - to, by * size));
      next = [from + moved, to + moved];
    } else if (event.key === "+") next = [from + size / 4, to - size / 4];
    else if (event.key === "-") next = [Math.max(first, from - size / 2), Math.min(last, to + size / 2)];
    if (!next) return;
    event.preventDefault();
    event.stopPropagation();
    if (next[1] - next[0] >= 1) this.choose(...next);
  }
}
