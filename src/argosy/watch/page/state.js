// What is shown lives in the address, so that a link shows another person the same.

const LISTS = ["run", "more"];
const NUMBERS = ["from", "to", "smooth", "rank_from", "rank_to"];
const TEXTS = ["view", "of", "log", "key", "node", "profile", "rank", "kinds", "sort"];

const listeners = new Set();
let state = parse(location.search);

function parse(search) {
  const given = new URLSearchParams(search);
  const parsed = {};
  for (const name of LISTS) parsed[name] = [...new Set(given.getAll(name))];
  for (const name of NUMBERS) {
    const value = given.has(name) ? Number(given.get(name)) : NaN;
    if (Number.isFinite(value)) parsed[name] = value;
  }
  for (const name of TEXTS) if (given.get(name)) parsed[name] = given.get(name);
  if (!(parsed.smooth > 0)) delete parsed.smooth;
  else parsed.smooth = Math.min(parsed.smooth, 0.99);
  return parsed;
}

function format(from) {
  const query = new URLSearchParams();
  for (const name of LISTS) for (const each of from[name]) query.append(name, each);
  for (const name of [...NUMBERS, ...TEXTS])
    if (from[name] !== undefined && from[name] !== "") query.set(name, from[name]);
  const text = query.toString();
  return text ? `?${text}` : location.pathname;
}

export const get = () => state;

/** Change some of it; undefined takes a key out. `step`: the browser's back button returns to what was before. */
export function set(changes, { step = false } = {}) {
  const before = state;
  state = { ...state, ...changes };
  const address = format(state);
  if (step) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
  for (const listener of listeners) listener(state, before);
}

/** Call `listener(now, before)` at every change. */
export function subscribe(listener) {
  listeners.add(listener);
}

/** The address of the same page with these changes, for links that can be opened in another tab. */
export const link = (changes) => format({ ...state, ...changes });

addEventListener("popstate", () => {
  const before = state;
  state = parse(location.search);
  for (const listener of listeners) listener(state, before);
});
