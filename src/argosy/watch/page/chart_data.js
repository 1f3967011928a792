// From the server's points to columns that uPlot draws.

import { colour, faint } from "./colours.js";
import { smooth, stacked } from "./curves.js";

const BANDS_UP_TO = 4; // with more runs, bands between least and greatest hide each other

// Several runs have steps of their own: one x for all, where a run without a value there is not a gap in its line.
export function linesOf(series, { smooth: factor = 0, logX, logY }) {
  const tables = [];
  const lines = [];
  const bands = [];
  const width = window.devicePixelRatio > 1 ? 1.5 : 1.4;
  for (const each of series) {
    const clean = (values) => values.map((value) => (value === undefined || (logY && value <= 0) ? null : value));
    const keep = logX ? each.step.map((step) => step > 0) : null;
    const cut = (values) => (keep ? values.filter((_, i) => keep[i]) : values);
    const columns = [];
    const add = (values, line, options) => {
      columns.push(cut(clean(values)));
      lines.push({
        ...line,
        colour: each.colour,
        dash: each.dash,
        options: { scale: "y", points: { show: false }, ...options },
      });
    };
    const stroke = () => colour(each.colour);
    const spread =
      each.min && each.max && series.length <= BANDS_UP_TO && each.mean.some((v, i) => each.max[i] > each.min[i]);
    if (spread && !factor) {
      add(each.max, {}, { stroke: () => "transparent", width: 0 });
      add(each.min, {}, { stroke: () => "transparent", width: 0 });
      bands.push({ series: [lines.length - 1, lines.length], fill: () => faint(each.colour, 0.16) });
    }
    if (factor > 0 && !each.isSparse) add(each.mean, {}, { stroke: () => faint(each.colour, 0.28), width: 1 });
    add(
      each.isSparse ? each.mean : smooth(each.mean, factor),
      { named: each.name },
      {
        stroke,
        width,
        dash: each.dash,
        // A mean over some time holds for all of it: a slope between two would be made up.
        ...(each.isStepped ? { paths: window.uPlot.paths.stepped({ align: 1 }) } : {}),
        points: each.points || each.mean.length < 3 ? { show: true, size: 5, fill: stroke } : { show: false },
      },
    );
    tables.push([cut(each.step), ...columns]);
  }
  // What lies alone between two gaps is drawn as well: a single value is a value.
  const data =
    tables.length === 1
      ? tables[0]
      : window.uPlot.join(
          tables,
          tables.map((table) => table.map(() => 2)),
        );
  return { data, lines, bands, shape: [lines.map((line) => [line.named, line.colour, line.options.points.show])] };
}

// From the whole down, each area over the one before: opaque, so that colours are those of the legend.
export function stackOf(series) {
  const sums = stacked(series.map((each) => each.mean));
  const order = series.map((each, i) => ({ each, sum: sums[i] })).reverse();
  const lines = order.map(({ each }) => ({
    named: each.name,
    colour: each.colour,
    value: (at) => each.mean[at],
    options: {
      scale: "y",
      points: { show: false },
      stroke: () => colour(each.colour),
      width: 0,
      fill: () => colour(each.colour),
    },
  }));
  return {
    data: [series[0].step, ...order.map(({ sum }) => sum)],
    lines,
    bands: [],
    shape: series.map((each) => each.name),
  };
}
