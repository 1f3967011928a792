// Runs before the first paint, so that nobody in a dark room is shown a white page for a moment.
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("argosy-theme");
  } catch {
    // Storage can be forbidden; the system's choice does then.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
