// Elements from code. Text from a run is only ever a text node or an attribute's value, never HTML, so a hostile name
// stays text.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. Attributes: `on…` are listeners, `style` an object of properties, null and false are left out. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    // One by one: the server's content security policy forbids the attribute.
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Put `children` in the place of all that `element` holds. */
export function replace(element, ...children) {
  const fragment = document.createDocumentFragment();
  append(fragment, children);
  element.replaceChildren(fragment);
}

/** Tell a screen reader. */
export function say(text) {
  const place = document.getElementById("said");
  if (place) place.textContent = text;
}

const ICONS = {
  moon: "M12.500 9.800A5.500 5.500 0 0 1 6.200 3.500a5.500 5.500 0 1 0 6.300 6.300z",
  sun: "M8 5a3 3 0 1 1 0 6 3 3 0 0 1 0-6zM8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15M3 3l1 1M12 12l1 1M3 13l1-1M12 4l1-1",
  auto: "M8 2a6 6 0 1 1 0 12A6 6 0 0 1 8 2zM8 2v12M8 5l4.500-1M8 8h6M8 11l4.500 1",
  download: "M8 2v8M4.500 7 8 10.500 11.500 7M2.500 13.500h11",
  picture: "M2 3h12v10H2zM2 11l4-4 3 3 2-2 3 3M11 6h.01",
  back: "M10 3 5 8l5 5",
  list: "M2.500 4h11M2.500 8h11M2.500 12h11",
  close: "M4 4l8 8M12 4l-8 8",
  question: "M5.800 6a2.200 2.200 0 1 1 3.400 1.900c-.800.500-1.200 1-1.200 1.900M8 12.300v.01",
  reset: "M3 8a5 5 0 1 0 1.500-3.500M3 2.500v2.500h2.500",
};

export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" },
    svg("path", {
      d: ICONS[name],
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "1.4",
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}
