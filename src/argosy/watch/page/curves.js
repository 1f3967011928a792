// Arithmetic on curves, without a screen.

/**
 * Exponential moving average of the finite values, debiased as in Adam: the first points are not pulled to zero.
 * What is not finite stays a gap, and does not spoil what follows.
 */
export function smooth(values, factor) {
  if (!(factor > 0)) return values;
  let average = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = factor * average + (1 - factor) * value;
    weight = factor * weight + (1 - factor);
    return average / weight;
  });
}

/** Sums of the first, the first two, ... columns: the upper edges of stacked areas. A missing part counts as nothing. */
export function stacked(columns) {
  const sums = [];
  columns.forEach((column, i) => sums.push(column.map((value, j) => (value ?? 0) + (i ? sums[i - 1][j] : 0))));
  return sums;
}

/** Index of the value nearest to `index` that is a number, within `reach`; null if there is none. */
export function nearest(values, index, reach = 60) {
  for (let distance = 0; distance <= reach; distance++) {
    for (const at of [index - distance, index + distance]) {
      if (values[at] !== null && values[at] !== undefined) return at;
    }
  }
  return null;
}

/** Ends of what is finite in the columns; null without any. */
export function extent(columns) {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (const value of column) {
      if (value === null || value === undefined) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

/** The middle value; of two, the lower: of two ranks the faster is the measure. Null without any. */
export function median(values) {
  const sorted = values.filter((value) => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
  return sorted.length ? sorted[(sorted.length - 1) >> 1] : null;
}

const WINDOW = 5;
const FEW = 50; // of so few values each may be looked at

/** The height that a column stays at for more than a moment: the most that the middle of five neighbours comes to. */
export function steadyHigh(column) {
  const values = column.filter((value) => value !== null && value !== undefined);
  if (values.length < FEW) return Math.max(...values);
  return Math.max(...values.slice(WINDOW - 1).map((_, i) => median(values.slice(i, i + WINDOW))));
}

/** Round places between two ends, for an axis or a legend. */
export function ticks(low, high, count = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= raw);
  const places = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step)
    places.push(Number(at.toPrecision(12)));
  return places;
}

/** Rows of text and numbers as CSV (RFC 4180); a missing value is an empty field. */
export function csv(head, rows) {
  const field = (value) => {
    if (value === null || value === undefined) return "";
    let text = String(value);
    // A spreadsheet would run a text that begins so as a formula.
    if (typeof value === "string" && /^[=+@-]/.test(text)) text = `'${text}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [head, ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}
