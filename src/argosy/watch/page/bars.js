// Bars of parts of a whole, and bars in tables.

import { h } from "./dom.js";
import { percent } from "./format.js";

/** One bar of `parts` [{name, value, colour}], as long as its sum is of `scale`; `mark` is a line across it. */
export function stackBar(parts, scale, format, { mark, label } = {}) {
  const total = parts.reduce((sum, part) => sum + (part.value || 0), 0);
  const share = (value) => `${(100 * value) / (scale || 1)}%`;
  return h(
    "div",
    {
      class: "parts",
      role: "img",
      "aria-label": `${label ?? ""} ${parts.map((part) => `${part.name} ${format(part.value)}`).join(", ")}`,
    },
    parts
      .filter((part) => part.value > 0)
      .map((part) =>
        h("span", {
          class: "part",
          style: { width: share(part.value), "--c": `var(--${part.colour})` },
          title: `${part.name}: ${format(part.value)} (${percent(part.value / total)})`,
        }),
      ),
    mark ? h("span", { class: "mark", style: { left: share(mark.value) }, title: mark.title }) : null,
  );
}

/** Names and values of the parts, with their colours. */
export function partsLegend(parts, format) {
  return h(
    "ul",
    { class: "legend" },
    parts.map((part) =>
      h(
        "li",
        {},
        h("i", { class: "swatch square", style: { "--c": `var(--${part.colour})` } }),
        h("span", { class: "name" }, part.name),
        h("b", {}, format(part.value)),
      ),
    ),
  );
}

/** A share of one, as a bar behind its number. */
export function meter(share, text, colour = "accent") {
  if (share === null || share === undefined) return h("span", { class: "muted" }, text);
  const width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h(
    "span",
    { class: "meter" },
    h("span", { class: "track" }, h("i", { style: { width, "--c": `var(--${colour})` } })),
    h("span", {}, text),
  );
}

/** A table: head [{text, number}] and rows of cells (text or element). Wide ones scroll inside their own frame. */
export function table(head, rows, { caption, id } = {}) {
  return h(
    "div",
    { class: "frame", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      { id },
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((each) => h("th", { scope: "col", class: each.number ? "number" : null }, each.text)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((cell, i) => h("td", { class: head[i].number ? "number" : null }, cell)),
          ),
        ),
      ),
    ),
  );
}

/** A card with a heading. */
export function card(title, ...children) {
  return h("section", { class: "card" }, h("header", {}, h("h3", {}, title)), children);
}

/** What stands where there is nothing to show: a sentence, and what would bring it. */
export function nothing(sentence, more) {
  return h("p", { class: "state" }, sentence, more ? h("span", { class: "more" }, more) : null);
}
