// Files that the browser makes: CSV of what is drawn, and pictures.

import { colour } from "./colours.js";
import { say } from "./dom.js";

const fileName = (text) =>
  text
    .replace(/[^\w.-]+/g, "-")
    .replace(/^-+|-+$/g, "")
    .slice(0, 80) || "argosy";

export function saveText(name, ending, text, type = "text/csv") {
  save(`${fileName(name)}.${ending}`, new Blob([text], { type: `${type};charset=utf-8` }));
}

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  say(`${name} is downloaded`);
}

/** Save a canvas as PNG, under its title and a legend of [name, css colour]. */
export function savePicture(name, canvas, title, legend = []) {
  const scale = window.devicePixelRatio || 1;
  const pad = 12 * scale;
  const font = (size, weight = 400) => `${weight} ${size * scale}px ${getComputedStyle(document.body).fontFamily}`;
  const picture = document.createElement("canvas");
  const head = 30 * scale + (legend.length ? 20 * scale : 0);
  picture.width = canvas.width + 2 * pad;
  picture.height = canvas.height + head + 2 * pad;
  const context = picture.getContext("2d");
  context.fillStyle = colour("surface");
  context.fillRect(0, 0, picture.width, picture.height);
  context.textBaseline = "middle";
  context.fillStyle = colour("ink");
  context.font = font(14, 600);
  context.fillText(title, pad, pad + 10 * scale);
  context.font = font(11);
  let x = pad;
  for (const [text, shade] of legend) {
    context.fillStyle = shade;
    context.fillRect(x, pad + 32 * scale, 10 * scale, 3 * scale);
    context.fillStyle = colour("muted");
    context.fillText(text, x + 14 * scale, pad + 34 * scale);
    x += context.measureText(text).width + 30 * scale;
  }
  context.drawImage(canvas, pad, pad + head);
  picture.toBlob((blob) => save(`${fileName(name)}.png`, blob), "image/png");
}
