// Devices and their hosts: how busy, how warm, how much power, what is left.

import { ofRun } from "../api.js";
import { card, meter, nothing, table } from "../bars.js";
import { Chart } from "../charts.js";
import { h, replace } from "../dom.js";
import { bytes, grouped, number, percent } from "../format.js";
import { sparkline } from "../sparkline.js";
import * as state from "../state.js";

const CURVES = [
  ["utilisation", "Utilisation", percent],
  ["power_w", "Power", (value, more = 0) => `${value.toFixed(more)} W`],
  ["temperature_c", "Temperature", (value, more = 0) => `${value.toFixed(more)} °C`],
  ["memory_bytes", "Memory", bytes],
  ["clock_mhz", "Clock", (value, more) => `${number(value, more)} MHz`],
];
const HOST = [
  ["cpu", "Processors in use", percent],
  ["memory_used_bytes", "Memory of the host", bytes],
  ["disk_free_bytes", "Disk left", bytes],
  ["network_sent_bytes_per_s", "Sent", (value, more) => `${bytes(value, more)}/s`],
  ["network_received_bytes_per_s", "Received", (value, more) => `${bytes(value, more)}/s`],
  ["load", "Load", number],
];
const HOT_C = 88;

const newest = (values) =>
  Array.isArray(values) ? values.findLast((value) => value !== null && value !== undefined) : values;
const ranksText = (ranks) =>
  !ranks?.length
    ? "–"
    : ranks.length > 4 && ranks.at(-1) - ranks[0] === ranks.length - 1
      ? `${ranks[0]}–${ranks.at(-1)}`
      : ranks.join(", ");

function create(root, page) {
  const charts = new Map();
  const devices = h("div", {});
  const hosts = h("div", {});
  const pick = h("select", { id: "node", onchange: () => state.set({ node: pick.value }) });
  const bar = h("div", { class: "tools-bar" }, h("label", { for: "node" }, "Curves of"), pick);
  const grid = h("div", { class: "charts" });
  const empty = h("div", {});
  const body = h("div", { class: "stack-of-cards" }, devices, hosts, bar, grid);
  replace(root, body, empty);

  async function refresh(signal) {
    const answer = await ofRun(page.primary(), "devices", {}, signal);
    const nodes = answer.nodes ?? [];
    const known = nodes.filter((node) => node.devices?.length || node.host);
    body.hidden = !known.length;
    replace(
      empty,
      known.length
        ? null
        : nothing(
            "No devices have been measured.",
            "NVML tells of NVIDIA devices; install argosy[devices] for processors, memory and disks of the host.",
          ),
    );
    if (!known.length) return;
    replace(devices, deviceTable(known, answer.more));
    replace(hosts, hostTable(known));
    const names = known.map((node) => node.node);
    if (pick.dataset.names !== names.join()) {
      pick.dataset.names = names.join();
      replace(
        pick,
        names.map((name) => h("option", { value: name }, name)),
      );
    }
    const shown = known.find((node) => node.node === state.get().node) ?? known[0];
    pick.value = shown.node;
    bar.hidden = known.length < 2;
    curves(shown);
  }

  function curves(node) {
    const wanted = [];
    const areAlike = new Set((node.devices ?? []).map((device) => device.name)).size < 2;
    for (const [key, title, format] of CURVES) {
      const series = (node.devices ?? [])
        .filter((device) => device[key]?.some?.((value) => value !== null))
        .map((device, i) => ({
          name: areAlike
            ? `rank ${ranksText(device.ranks)}`
            : `${device.name ?? "device"} (${ranksText(device.ranks)})`,
          run: node.node,
          colour: `run-${i % 10}`,
          step: device.time_s,
          mean: device[key],
        }));
      if (series.length) wanted.push([key, title, format, series]);
    }
    for (const [key, title, format] of HOST) {
      if (node.host?.[key]?.some?.((value) => value !== null))
        wanted.push([
          `host.${key}`,
          title,
          format,
          [{ name: node.node, run: node.node, colour: "accent", step: node.host.time_s, mean: node.host[key] }],
        ]);
    }
    const elements = wanted.map(([key, title, format, series]) => {
      if (!charts.has(key)) charts.set(key, new Chart({ title, format, height: 120, isTime: true, group: "devices" }));
      const chart = charts.get(key);
      chart.pending = { series, window: null };
      return chart.element;
    });
    if (elements.some((element, i) => grid.children[i] !== element) || grid.children.length !== elements.length)
      replace(grid, elements);
    for (const [key] of wanted) charts.get(key).update(charts.get(key).pending);
  }

  return {
    refresh,
    recolour: () => charts.forEach((chart) => chart.recolour()),
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}

function deviceTable(nodes, more) {
  const rows = nodes.flatMap((node) =>
    (node.devices ?? []).map((device) => {
      const [use, heat] = [newest(device.utilisation), newest(device.temperature_c)];
      return [
        node.node,
        device.name ?? "–",
        ranksText(device.ranks),
        meter(use, percent(use)),
        sparkline(device.utilisation, { width: 80, height: 20, low: 0, high: 1 }),
        bytes(newest(device.memory_bytes)),
        h("span", { class: heat >= HOT_C ? "warn" : null }, heat === undefined ? "–" : `${Math.round(heat)} °C`),
        newest(device.power_w) === undefined ? "–" : `${Math.round(newest(device.power_w))} W`,
        newest(device.clock_mhz) === undefined ? "–" : `${Math.round(newest(device.clock_mhz))} MHz`,
      ];
    }),
  );
  if (!rows.length)
    return card("Devices", h("p", { class: "muted" }, "No accelerator: this run trains on processors."));
  const head = [
    { text: "Node" },
    { text: "Device" },
    { text: "Ranks" },
    { text: "Utilisation" },
    { text: "so far" },
    ...["Memory", "Temperature", "Power", "Clock"].map((text) => ({ text, number: true })),
  ];
  return card(
    "Devices now",
    table(head, rows, { caption: "Devices, newest values" }),
    more ? h("p", { class: "muted" }, `${grouped(more)} more nodes are not shown.`) : null,
  );
}

function hostTable(nodes) {
  const rows = nodes
    .filter((node) => node.host)
    .map(({ node, host }) => {
      const used = newest(host.memory_used_bytes);
      const all = newest(host.memory_bytes);
      const left = newest(host.disk_free_bytes);
      const rate = (key) => (newest(host[key]) === undefined ? "–" : `${bytes(newest(host[key]))}/s`);
      const cpu = newest(host.cpu);
      return [
        node,
        meter(cpu, percent(cpu)),
        meter(used && all ? used / all : null, all ? `${bytes(used)} of ${bytes(all)}` : bytes(used)),
        h("span", { class: left < 10e9 ? "warn" : null }, bytes(left)),
        rate("network_sent_bytes_per_s"),
        rate("network_received_bytes_per_s"),
        number(newest(host.load)),
      ];
    });
  if (!rows.length) return null;
  const head = [
    { text: "Node" },
    { text: "Processors" },
    { text: "Memory" },
    ...["Disk left", "Sent", "Received", "Load"].map((text) => ({ text, number: true })),
  ];
  return card("Hosts now", table(head, rows, { caption: "Hosts, newest values" }));
}

export default { name: "devices", title: "Devices", create };
