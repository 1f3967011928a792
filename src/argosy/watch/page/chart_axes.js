// Axes of charts, and what is drawn over the curves.

import { colour } from "./colours.js";
import { extent, steadyHigh, ticks } from "./curves.js";
import { clock, grouped } from "./format.js";

const MOST_DIGITS = 6;
const SPIKE = 3; // where a spike rises so many times as far as all else, it leaves the chart
const LEAST_K = 1e4; // from this number on an axis has thousands, "8k", also at its smaller places

/** uPlot's options for both axes of a Chart. */
export function axesOf(chart, { logX, logY }) {
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: colour("muted"), font, ticks: { show: false } };
  const written = (format) => (plot, at) => exact(at, format);
  const grid = { stroke: colour("line"), width: 1 };
  return [
    {
      ...axis,
      grid: { show: false },
      size: 20,
      gap: 4,
      space: 70,
      values: chart.isTime ? times : written(grouped),
      ...(logX ? sparse : {}),
    },
    { ...axis, grid, size: sizeOf, gap: 6, space: 32, values: written(chart.axis), ...(logY ? between : {}) },
  ];
}

/** Labels of these places, with as many more digits as say where they are: a curve may stay within a percent. */
function exact(places, format) {
  const thousand = Math.max(...places.map(Math.abs)) >= LEAST_K ? 1e3 : undefined;
  const written = (more) => places.map((each) => (each === null ? "" : format(each, more, thousand)));
  let labels = written(0);
  for (let more = 1; more <= MOST_DIGITS; more++) {
    const finer = written(more);
    const said = labels.filter(Boolean);
    if (new Set(said).size === said.length && finer.every((label, i) => isNoFiner(label, labels[i]))) break;
    labels = finer;
  }
  return labels;
}

// Ticks are round: one more digit that is a zero says nothing. With another unit, the one before will do.
function isNoFiner(label, before) {
  const plain = (text) => text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
  const unit = (text) => text.replace(/[\d.\s-]/g, "");
  return unit(label) !== unit(before) || plain(label) === plain(before);
}

// With seconds where two labels would else be the same minute.
const times = (plot, at, axis, space, step) => at.map((each) => clock(each, step < 60));

/** uPlot's options for both scales. */
export function scalesOf({ kind, isTime }, { logX, logY }) {
  const x = {
    time: isTime,
    distr: logX ? 3 : 1,
    range: (plot, low, high) => (high > low ? [low, high] : [low, low + 1]),
  };
  const y = logY
    ? { distr: 3, range: (plot, low, high) => logRange(low, high) }
    : { range: (plot, low, high) => yRange(low, withoutSpikes(plot, kind === "stack" ? 0 : low, high), kind) };
  return { x, y };
}

function withoutSpikes(plot, low, high) {
  if (low === null || high === null) return high;
  const [from, to] = plot.series[0].idxs;
  const columns = plot.data.slice(1).map((column) => column.slice(from, to + 1));
  const most = low + SPIKE * (Math.max(...columns.map(steadyHigh)) - low);
  return most > low && high > most ? extent(columns.map((column) => column.filter((value) => value <= most)))[1] : high;
}

function yRange(low, high, kind) {
  if (low === null || high === null) return [0, 1];
  if (kind === "stack") return [0, high * 1.05 || 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  // What cannot be negative does not begin below zero.
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

function logRange(low, high) {
  if (!(low > 0) || !(high > 0)) return [0.1, 1];
  return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
}

// Within a decade or two a logarithmic axis has round places too, which uPlot would leave without a word.
const between = {
  splits: (plot, i, low, high) => {
    if (high / low < 30) return ticks(low, high, 4);
    const decades = [];
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++) decades.push(10 ** power);
    return decades;
  },
  filter: (plot, splits) => splits,
};
const sparse = {
  splits: (plot, i, low, high) =>
    [1, 2, 5]
      .flatMap((m) => [...Array(12).keys()].map((p) => m * 10 ** p))
      .sort((a, b) => a - b)
      .filter((at) => at >= low && at <= high),
  filter: (plot, splits) => splits.map((at) => (splits.length > 8 && Math.log10(at) % 1 !== 0 ? null : at)),
};

function sizeOf(plot, values) {
  if (!values?.length) return 44;
  const longest = values.reduce((a, b) => (String(b).length > a.length ? String(b) : a), "");
  return Math.max(44, Math.ceil(longest.length * 6.3) + 14);
}
/** Events on the curve: a thin line each, in the colour of its kind. */
export function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of marks) {
    if (mark.step < plot.scales.x.min || mark.step > plot.scales.x.max) continue;
    const x = Math.round(plot.valToPos(mark.step, "x", true));
    ctx.strokeStyle = colour(mark.colour);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillStyle = colour(mark.colour);
    ctx.beginPath();
    ctx.arc(x, bbox.top + 2 * devicePixelRatio, 3 * devicePixelRatio, 0, 7);
    ctx.fill();
  }
  ctx.restore();
}

/** Spikes that leave the chart: a pale triangle at its top. */
export function drawSpikes(plot) {
  const { ctx, bbox } = plot;
  const size = 4 * devicePixelRatio;
  const [from, to] = plot.series[0].idxs;
  ctx.save();
  ctx.fillStyle = colour("muted");
  for (let i = from; i <= to; i++) {
    if (!plot.data.some((column, n) => n > 0 && column[i] > plot.scales.y.max)) continue;
    const x = plot.valToPos(plot.data[0][i], "x", true);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x + size, bbox.top + 2 * size);
    ctx.lineTo(x - size, bbox.top + 2 * size);
    ctx.fill();
  }
  ctx.restore();
}

/** Steps whose value was NaN or infinite: a red triangle at the foot, since a curve can only leave them out. */
export function drawBad(plot, series) {
  const { ctx, bbox } = plot;
  const size = 4 * devicePixelRatio;
  ctx.save();
  ctx.fillStyle = colour("bad");
  for (const step of series.flatMap((each) => each.bad ?? [])) {
    if (step < plot.scales.x.min || step > plot.scales.x.max) continue;
    const x = plot.valToPos(step, "x", true);
    const foot = bbox.top + bbox.height;
    ctx.beginPath();
    ctx.moveTo(x, foot - 2 * size);
    ctx.lineTo(x + size, foot);
    ctx.lineTo(x - size, foot);
    ctx.fill();
  }
  ctx.restore();
}
