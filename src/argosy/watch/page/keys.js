// The keyboard, and the sheet that tells it.

import { h } from "./dom.js";

const SHEET = [
  ["?", "this sheet"],
  ["1 … 9, 0", "the views, in their order"],
  ["[ and ]", "the view before, the next"],
  ["j and k", "the next run, the one before"],
  ["r", "all runs"],
  ["/", "filter the runs"],
  ["l", "logarithmic values, on and off"],
  ["s", "more smoothing, S less"],
  ["z", "all steps again"],
  ["t", "light, dark, or as the system"],
  ["In a chart or map", ""],
  ["← →", "the step before, the next (Home, End, Page)"],
  ["+ − 0", "closer, farther, all steps"],
  ["drag", "choose steps; double click shows all"],
];

/** Listen for keys; `actions` maps a key to a function. */
export function listen(actions) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input:not([type=checkbox]):not([type=range]), select, textarea, dialog")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

/** Show the sheet; Escape or the button closes it. */
export function showSheet() {
  if (document.querySelector("dialog[open]")) return;
  const close = () => dialog.close();
  const dialog = h(
    "dialog",
    {
      class: "sheet",
      "aria-labelledby": "keys-title",
      onclose: () => dialog.remove(),
      onclick: (event) => event.target === dialog && close(),
    },
    h(
      "header",
      {},
      h("h2", { id: "keys-title" }, "Keyboard"),
      h("button", { type: "button", class: "quiet", onclick: close }, "Close"),
    ),
    h(
      "dl",
      {},
      SHEET.map(([key, meaning]) =>
        meaning ? h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, meaning)) : h("h3", {}, key),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}
