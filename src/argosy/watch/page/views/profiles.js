// Profiles that were recorded: top operations, exposed communication, gaps, beside the plan.

import { ofRun, profileFile } from "../api.js";
import { card, meter, nothing, table } from "../bars.js";
import { h, replace } from "../dom.js";
import { bytes, duration, grouped, percent, words } from "../format.js";
import * as state from "../state.js";

function create(root, page) {
  async function refresh(signal) {
    const answer = await ofRun(page.primary(), "profiles", {}, signal);
    const profiles = Array.isArray(answer) ? answer : (answer.profiles ?? []);
    if (!profiles.length)
      return replace(
        root,
        nothing("No steps of this run have been profiled.", [
          "Record some with ",
          h("code", {}, "argosy train --profile 10:13"),
          ".",
        ]),
      );
    const profile = profiles.find((each) => each.name === state.get().profile) ?? profiles.at(-1);
    const ranks = Object.keys(profile.ranks ?? {});
    const rank = ranks.includes(state.get().rank) ? state.get().rank : ranks[0];
    replace(
      root,
      h(
        "div",
        { class: "stack-of-cards" },
        choosers(profiles, profile, ranks, rank),
        rank === undefined ? nothing("This profile has no summary.", profile.problem) : ofRank(profile.ranks[rank]),
        files(page.primary(), profile),
      ),
    );
  }
  return { refresh };
}

const stepsText = (profile) =>
  profile.steps?.length ? `steps ${grouped(profile.steps[0])} to ${grouped(profile.steps.at(-1))}` : profile.name;

function choosers(profiles, profile, ranks, rank) {
  const select = (id, label, options, value, change) => [
    h("label", { for: id }, label),
    h(
      "select",
      { id, onchange: (event) => change(event.target.value) },
      options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)),
    ),
  ];
  return h(
    "div",
    { class: "tools-bar" },
    select(
      "profile",
      "Profile",
      profiles.map((each) => [each.name, stepsText(each)]),
      profile.name,
      (name) => state.set({ profile: name }),
    ),
    ranks.length > 1
      ? select(
          "rank",
          "Rank",
          ranks.map((each) => [each, each]),
          rank,
          (name) => state.set({ rank: name }),
        )
      : h("span", { class: "muted" }, `rank ${rank ?? "–"}`),
  );
}

function ofRank(told) {
  const operations = (told.operations ?? []).slice(0, 30);
  const greatest = Math.max(...operations.map((each) => each.share ?? 0), 1e-9);
  const axes = Object.entries(told.communication ?? {});
  const gaps = told.gaps ?? [];
  const parts = Object.entries(told.parts ?? {});
  return [
    operations.length
      ? card(
          "Top operations",
          table(
            [{ text: "Operation" }, { text: "Share" }, { text: "Time", number: true }],
            operations.map((each) => [
              h("code", { class: "wrap" }, each.name),
              meter(each.share / greatest, percent(each.share, 1)),
              duration(each.seconds),
            ]),
            { caption: "Operations by their time" },
          ),
        )
      : null,
    h(
      "div",
      { class: "two" },
      axes.length
        ? card(
            "Communication",
            table(
              [{ text: "Axis" }, { text: "In all", number: true }, { text: "Exposed", number: true }],
              axes.map(([axis, each]) => [
                axis,
                duration(each.seconds),
                h(
                  "span",
                  { class: each.exposed_seconds > 0.5 * each.seconds ? "warn" : null },
                  `${duration(each.exposed_seconds)}${each.seconds ? ` (${percent(each.exposed_seconds / each.seconds)})` : ""}`,
                ),
              ]),
              { caption: "Communication by axis" },
            ),
          )
        : null,
      parts.length
        ? card(
            "Beside the plan",
            table(
              [{ text: "Part" }, { text: "Plan", number: true }, { text: "Measured", number: true }],
              parts.map(([name, each]) => [
                words(name),
                duration(each?.predicted),
                duration(typeof each === "number" ? each : each?.measured),
              ]),
              { caption: "Parts, predicted and measured" },
            ),
          )
        : null,
      told.idle_s === undefined
        ? null
        : card(
            "Idle",
            h("p", { class: "figure" }, h("b", {}, duration(told.idle_s)), " in which nothing ran"),
            gaps.length
              ? h(
                  "ul",
                  { class: "evidence" },
                  gaps.slice(0, 8).map((gap) => h("li", {}, typeof gap === "object" ? gapText(gap) : String(gap))),
                )
              : null,
          ),
    ),
  ];
}

function gapText(gap) {
  const { seconds, after, before, ...rest } = gap;
  const others = Object.entries(rest)
    .filter(([, value]) => typeof value !== "object")
    .map(([key, value]) => `${words(key)} ${typeof value === "number" ? Number(value.toPrecision(4)) : value}`);
  return [
    seconds === undefined ? null : duration(seconds),
    after ? `after ${after}` : null,
    before ? `before ${before}` : null,
    ...others,
  ]
    .filter(Boolean)
    .join(", ");
}

function link(id, profile, file) {
  if (!/\.(json|json\.gz|pickle)$/.test(file)) return file;
  return h("a", { href: profileFile(id, profile.name, file), download: file }, file);
}

function files(id, profile) {
  const list = profile.files ?? [];
  if (!list.length) return null;
  return card(
    "Files",
    h(
      "p",
      { class: "muted" },
      "Open traces in ",
      h("b", {}, "ui.perfetto.dev"),
      " and memory snapshots in ",
      h("b", {}, "pytorch.org/memory_viz"),
      ". They lie in the run’s folder, profiles/",
      profile.name,
      ".",
    ),
    h(
      "ul",
      { class: "evidence" },
      list.map((each) => h("li", {}, link(id, profile, each.name), ` ${bytes(each.bytes)}`)),
    ),
  );
}

export default { name: "profiles", title: "Profiles", create };
