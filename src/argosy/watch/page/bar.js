// The bar on top: the way home, light and dark, and whether the page is live.

import { h, icon, replace, say } from "./dom.js";
import { clock } from "./format.js";
import { showSheet } from "./keys.js";

const THEMES = { auto: "as the system", light: "light", dark: "dark" };

let recoloured = () => {};

/** Draw it. home(): show all runs; recolour(): draw canvases in the colours of now. */
export function drawBar(home, recolour) {
  recoloured = recolour;
  const drawer = () => document.body.classList.toggle("drawer");
  replace(
    document.getElementById("bar"),
    h(
      "button",
      {
        type: "button",
        class: "tool drawer-button",
        "aria-label": "Choose runs",
        title: "Choose runs",
        onclick: drawer,
      },
      icon("list"),
    ),
    h(
      "a",
      { class: "brand", href: location.pathname, onclick: (event) => (event.preventDefault(), home()) },
      h("img", { src: "static/icon.svg", alt: "", width: 20, height: 20 }),
      "Argosy",
      h("span", { class: "muted all-runs" }, "all runs"),
    ),
    h("span", { class: "grow" }),
    h("span", { id: "live", class: "live", role: "status" }),
    h("button", { type: "button", class: "tool", id: "theme", onclick: turnTheme }),
    h(
      "button",
      { type: "button", class: "tool", "aria-label": "Keyboard", title: "Keyboard (?)", onclick: showSheet },
      icon("question"),
    ),
  );
  drawTheme();
}

const theme = () => document.documentElement.dataset.theme ?? "auto";

function drawTheme() {
  const button = document.getElementById("theme");
  replace(button, icon({ auto: "auto", light: "sun", dark: "moon" }[theme()]));
  button.title = `Colours: ${THEMES[theme()]} (t)`;
  button.setAttribute("aria-label", button.title);
}

/** The next of: as the system, light, dark. The browser remembers it. */
export function turnTheme() {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme()) + 1) % names.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("argosy-theme", next);
  } catch {
    // It lasts for this page, then.
  }
  say(`Colours: ${THEMES[next]}`);
  drawTheme();
  recoloured();
}

/** Say whether what is shown follows the run. live: {state, since}. */
export function drawLive(live) {
  const place = document.getElementById("live");
  const words = { live: "Live", waiting: "Connecting …", lost: `Not live since ${clock(live.since)}` }[live.state];
  place.className = `live ${live.state}`;
  place.title =
    live.state === "live"
      ? "What is shown follows the run"
      : "The server does not answer; it is asked again and again. What is shown is what was known last.";
  if (place.textContent !== words) replace(place, h("i", { "aria-hidden": "true" }), words);
}
