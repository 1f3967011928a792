// Numbers as people read them. Every function answers "–" where there is no number. `more`: so many digits more.

export const NONE = "–";

const missing = (value) => value === null || value === undefined || !Number.isFinite(value);

/** Three to four significant digits: 12.3k, 0.00123, 6.957. thousand: from where on they are written as k. */
export function number(value, more = 0, thousand = 1e4) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-4) return value.toExponential(2 + more).replace("e+", "e");
  for (const [limit, unit] of [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
    [thousand, "k"],
  ]) {
    if (size >= limit) return digits(value / (unit === "k" ? 1e3 : limit), 3 + more) + unit;
  }
  return size >= 1000 && Number.isInteger(value) ? grouped(value) : digits(value, 4 + more);
}

function digits(value, count) {
  const whole = Math.abs(value) >= 1 ? Math.floor(Math.log10(Math.abs(value))) + 1 : 0;
  const behind =
    whole > 0 ? Math.max(0, count - whole) : Math.min(12, count - 1 - Math.floor(Math.log10(Math.abs(value))));
  const text = value.toFixed(behind);
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
}

/** A count with its thousands set apart. */
export function grouped(value) {
  return missing(value)
    ? NONE
    : Math.round(value)
        .toString()
        .replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** A loss: three digits behind the point, so that it does not jump in width while it falls. */
export const loss = (value) => (missing(value) ? NONE : Math.abs(value) >= 1e4 ? number(value) : value.toFixed(3));

export const percent = (value, behind = 0) => (missing(value) ? NONE : `${(100 * value).toFixed(behind)}\u00a0%`);

export function bytes(value, more = 0) {
  if (missing(value)) return NONE;
  for (const [limit, unit] of [
    [1e15, "PB"],
    [1e12, "TB"],
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ]) {
    if (Math.abs(value) >= limit) return `${digits(value / limit, 3 + more)}\u00a0${unit}`;
  }
  return `${digits(value, 3)}\u00a0B`;
}

/** A length of time in its two largest units. */
export function duration(seconds, more = 0) {
  if (missing(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${digits(seconds * 1e6, 3 + more)}\u00a0µs`;
  if (size < 1) return `${digits(seconds * 1000, 3 + more)}\u00a0ms`;
  if (size < 60 || more) return `${digits(seconds, 3 + more)}\u00a0s`;
  if (size < 3600) return two(seconds, 60, "min", 1, "s");
  if (size < 86400) return two(seconds, 3600, "h", 60, "min");
  return two(seconds, 86400, "d", 3600, "h");
}

function two(seconds, large, largeUnit, small, smallUnit) {
  const total = Math.round(seconds / small);
  const per = Math.round(large / small);
  const rest = total % per;
  return `${Math.floor(total / per)}\u00a0${largeUnit}${rest ? `\u00a0${rest}\u00a0${smallUnit}` : ""}`;
}

/** "14:02", or with the day where that is not today. */
export function clock(time_s, withSeconds = false) {
  if (missing(time_s)) return NONE;
  const date = new Date(time_s * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? `:${two(date.getSeconds())}` : ""}`;
  if (date.toDateString() === new Date().toDateString()) return time;
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const year = date.getFullYear() === new Date().getFullYear() ? "" : ` ${date.getFullYear()}`;
  return `${day}${year} ${time}`;
}

export function ago(time_s) {
  if (missing(time_s)) return NONE;
  const seconds = Date.now() / 1000 - time_s;
  if (seconds < 5) return "just now";
  return `${duration(seconds < 60 ? Math.round(seconds) : seconds < 3600 ? 60 * Math.round(seconds / 60) : seconds)} ago`;
}

export function money(value, currency) {
  if (missing(value)) return NONE;
  const text =
    value >= 1000
      ? grouped(value)
      : value >= 100
        ? value.toFixed(0)
        : value >= 0.01 || value === 0
          ? value.toFixed(2)
          : digits(value, 2);
  return currency ? `${text} ${currency}` : text;
}

/** [low, middle, high] of an estimate, given so or as {low, mid, high}; empty without one. */
export function interval(estimate) {
  if (!estimate) return [];
  return Array.isArray(estimate) ? estimate : [estimate.low, estimate.mid ?? estimate.middle, estimate.high];
}

/** What each kind of value is written with; unknown keys are plain numbers. */
const BY_KEY = {
  loss,
  validation_loss: loss,
  bits_per_byte: loss,
  tokens_per_s: number,
  mfu: (value, more = 0) => percent(value, 1 + more),
  step_time_s: duration,
  tokens: number,
  validation_accuracy: (value, more = 0) => percent(value, 1 + more),
};

export function forKey(key) {
  if (BY_KEY[key]) return BY_KEY[key];
  if (/bytes/.test(key)) return bytes;
  if (/^seconds\./.test(key) || /_s$/.test(key)) return duration;
  return number;
}

const TITLES = {
  loss: "Loss",
  validation_loss: "Validation loss",
  lr: "Learning rate",
  grad_norm: "Gradient norm",
  tokens_per_s: "Tokens per second",
  mfu: "MFU",
  memory_bytes: "Memory",
  step_time_s: "Step time",
  bits_per_byte: "Bits per byte",
};

/** The heading of a curve: "seconds.forward" is "Forward, seconds". */
export function title(key) {
  if (TITLES[key]) return TITLES[key];
  const words = key.replace(/_bytes$|_s$/, "").split(".");
  const last = words.at(-1).replaceAll("_", " ");
  return words[0] === "user"
    ? words.slice(1).join(".")
    : words.length > 1
      ? `${words.slice(0, -1).join(" ")}: ${last}`
      : last[0].toUpperCase() + last.slice(1);
}

/** "forward_backward" as words. */
export const words = (name) => String(name).replaceAll("_", " ");
