// Colours: of runs, of parts, and of the page's own variables where a canvas needs them.

const RUNS = 10;
const PARTS = {
  forward: "a",
  pipeline: "a",
  forward_backward: "a",
  matmul: "a",
  ideal: "a",
  useful: "a",
  weights: "a",
  steps: "a",
  backward: "b",
  attention: "b",
  gradients: "b",
  overhead: "b",
  pointwise: "c",
  optimizer: "c",
  communication: "d",
  tensor: "d",
  activations: "d",
  lost: "g",
  repeated: "g",
  checkpoint: "e",
  logits: "e",
  experts: "e",
  data: "f",
  agreement: "g",
  workspace: "f",
  check: "g",
  recovery: "d",
  recovering: "d",
  down: "d",
  evaluate: "h",
  context: "h",
  reserve: "i",
  startup: "i",
  starting: "i",
  host: "i",
  other: "rest",
  rest: "rest",
  idle: "rest",
  unknown: "rest",
};
const SPARE = ["h", "i", "g", "f", "e", "d"];

let probe;
let known = new Map();

/** The computed value of a colour variable, for canvases: they do not know var() or light-dark(). */
export function colour(name) {
  if (!known.has(name)) {
    if (!probe) {
      probe = document.createElement("span");
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

/** The same with an opacity. */
export function faint(name, alpha) {
  const [red, green, blue] = rgb(name);
  return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
}

export function rgb(name) {
  return colour(name)
    .match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
}

/** Forget what was computed: light has become dark, or the other way. */
export function forget() {
  known = new Map();
}

function hash(text) {
  let value = 2166136261;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 16777619);
  return value >>> 0;
}

/**
 * A colour variable for each run. A run has the colour of its name, wherever it is shown; of two that would share one
 * the later takes the next that is free, so a link shows everybody the same colours.
 */
export function ofRuns(ids) {
  const taken = new Map();
  const used = new Set();
  for (const id of ids) {
    let place = hash(id) % RUNS;
    for (let tries = 0; used.has(place) && tries < RUNS; tries++) place = (place + 1) % RUNS;
    used.add(place);
    taken.set(id, `run-${place}`);
  }
  return taken;
}

/** Colour variables for parts of a whole: known names have their own, others what is free. */
export function ofParts(names) {
  const result = new Map();
  const used = new Set(names.map((name) => PARTS[name]).filter(Boolean));
  const spare = SPARE.filter((each) => !used.has(each));
  for (const name of names) result.set(name, `part-${PARTS[name] ?? spare.shift() ?? "rest"}`);
  return result;
}
