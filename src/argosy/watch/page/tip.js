// The small box beside the pointer. One for the page.

import { h, replace } from "./dom.js";

/** Show lines of text near a place in the window, always inside it. */
export function showTip(lines, x, y) {
  const tip = document.getElementById("tip");
  replace(
    tip,
    lines.map((line, i) => h(i ? "span" : "b", {}, line)),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(4, y - height - 10) : y + 18}px`;
}

export function hideTip() {
  document.getElementById("tip").hidden = true;
}
