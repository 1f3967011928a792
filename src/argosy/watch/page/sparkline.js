// A curve the size of a word.

import { extent } from "./curves.js";
import { svg } from "./dom.js";

/** An SVG of `values`; gaps where a value is missing. */
export function sparkline(values, { width = 96, height = 22, colour = "accent", low, high } = {}) {
  const picture = svg("svg", {
    class: "spark",
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    "aria-hidden": "true",
    preserveAspectRatio: "none",
  });
  const ends = extent([values ?? []]);
  if (!ends) return picture;
  const bottom = low ?? ends[0];
  const scale = (high ?? ends[1]) - bottom || 1;
  let path = "";
  let drawing = false;
  values.forEach((value, i) => {
    if (value === null || value === undefined) {
      drawing = false;
      return;
    }
    const x = values.length > 1 ? (i / (values.length - 1)) * (width - 2) + 1 : width / 2;
    const y = height - 2 - ((value - bottom) / scale) * (height - 4);
    path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    drawing = true;
  });
  picture.append(
    svg("path", {
      d: path,
      fill: "none",
      stroke: `var(--${colour})`,
      "stroke-width": "1.3",
      "stroke-linejoin": "round",
      "vector-effect": "non-scaling-stroke",
    }),
  );
  return picture;
}
