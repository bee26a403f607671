// Groups to open and read: those that were completed last.

import { by, el } from "./dom.js";
import { NONE, duration, fixed, integer, known } from "./format.js";
import { versionColour } from "./theme.js";

const ROWS = 12;

export class Samples {
  constructor(model) {
    this.model = model;
    this.clear();
  }

  clear() {
    by("samples").replaceChildren(el("p", { class: "empty" }, "No group is complete yet."));
  }

  update(changed) {
    if (!changed.has("samples")) return;
    const groups = this.model.sections.samples;
    if (!groups.length) return this.clear();
    const box = by("samples");
    if (box.contains(document.activeElement) || box.matches(":hover")) return; // not under the hand of somebody who is about to open one
    box.replaceChildren(table(groups.slice(0, ROWS), this.model.at));
  }
}

function table(groups, now) {
  const head = ["group", "version", "rewards", "mean", "tokens", "where", "complete for"];
  return el(
    "table",
    { class: "samples" },
    el("caption", { class: "unseen" }, "Newest complete groups"),
    el("thead", {}, el("tr", {}, ...head.map((text, at) => el("th", { scope: "col", class: at > 2 && at !== 5 ? "number" : null }, text)))),
    el("tbody", {}, ...groups.map((group) => row(group, now))),
  );
}

function row([id, step, version, completed_at, tokens, rewards], now) {
  const values = rewards.filter(known);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const swatch = el("span", { class: "swatch" });
  swatch.style.background = versionColour(version);
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("a", { href: `#group/${id}` }, id)),
    el("td", {}, swatch, version || NONE),
    el("td", {}, strip(rewards)),
    el("td", { class: "number" }, fixed(mean, 3)),
    el("td", { class: "number" }, integer(tokens)),
    el("td", {}, step ? `step ${step}` : "buffer"),
    el("td", { class: "number" }, duration(Math.max(0, now - completed_at))),
  );
}

/** A mark for each sibling, as high as its reward between the least and the most of its group. */
export function strip(rewards) {
  const values = rewards.filter(known);
  const least = Math.min(0, ...values), most = Math.max(1, ...values);
  const marks = rewards.map((value) => {
    const mark = el("span", { class: known(value) ? "mark" : "mark none" });
    if (known(value)) mark.style.height = `${8 + (92 * (value - least)) / (most - least)}%`;
    return mark;
  });
  return el("span", { class: "strip", role: "img", "aria-label": `rewards ${values.map((value) => fixed(value, 2)).join(", ")}` }, ...marks);
}
