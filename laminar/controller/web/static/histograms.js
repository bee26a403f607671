// Histograms as tables with a bar in each row: one can read them, and have them read.

import { by, el, say } from "./dom.js";
import { integer, percent } from "./format.js";

const STALENESSES = [
  ["s_gen", "while generated", "s_gen: trainer steps made between a trajectory's first and last token"],
  ["residence", "in the buffer", "residence: trainer steps made between its last token and its sampling"],
  ["s_train", "when trained", "s_train: the sum of both, how old the weights are that made what is trained"],
];
const ROWS_MAX = 12;

export class Histograms {
  constructor(model) {
    this.model = model;
    this.ages = new Histogram("Age of the buffered groups", "age", "groups");
    this.behind = new Histogram("Trainer steps behind, if sampled now", "steps", "groups");
    this.limits = el("p", { class: "plain" });
    by("buffer").append(this.limits, el("div", { class: "histograms two" }, this.ages.node, this.behind.node));
    this.staleness = STALENESSES.map(([name, title, meaning]) => new Histogram(`${name}: ${title}`, "steps", "trajectories", meaning));
    by("staleness").append(...this.staleness.map((histogram) => histogram.node));
  }

  update(changed) {
    const { buffer, staleness } = this.model.sections;
    if (changed.has("buffer")) this.buffer(buffer);
    if (!changed.has("staleness")) return;
    say(by("staleness-of"), staleness.steps ? `trained trajectories of the last ${integer(staleness.steps)} steps` : "no step is trained yet");
    STALENESSES.forEach(([name], at) => this.staleness[at].show(bounded(staleness[name])));
  }

  buffer(buffer) {
    const ready = buffer.max_ready_groups ? `, at most ${integer(buffer.max_ready_groups)} ready` : "";
    say(this.limits, `${integer(buffer.groups)} groups are complete, a batch takes ${integer(buffer.batch_groups)}. ${integer(buffer.outstanding)} of at most ${integer(buffer.max_groups)} are in flight or buffered${ready}; ${integer(buffer.queued_groups)} have queued siblings.`);
    this.ages.show(ages(buffer.ages_s, this.model.sections.age_edges_s));
    this.behind.show(bounded(buffer.ages_steps));
  }
}

/** From the first to the last bin that has something. */
function ages(counts, edges_s) {
  const used = counts.map((num, at) => (num ? at : -1)).filter((at) => at >= 0);
  if (!used.length) return [];
  const rows = [];
  for (let at = used[0]; at <= used.at(-1); at += 1) {
    const from = at === 0 ? null : edges_s[at - 1], to = edges_s[at];
    rows.push([from === null ? `< ${to} s` : to === undefined ? `≥ ${from} s` : `${from}–${to} s`, counts[at]]);
  }
  return rows;
}

/** [value, num] …, values without gaps; the last row takes the rest. */
function bounded(pairs) {
  if (!pairs.length) return [];
  const counts = new Map(pairs);
  const last = pairs.at(-1)[0];
  const rows = [];
  for (let value = 0; value <= Math.min(last, ROWS_MAX - 2); value += 1) rows.push([String(value), counts.get(value) ?? 0]);
  const rest = pairs.filter(([value]) => value > ROWS_MAX - 2).reduce((sum, [, num]) => sum + num, 0);
  if (rest) rows.push([`≥ ${ROWS_MAX - 1}`, rest]);
  return rows;
}

class Histogram {
  constructor(title, values, things, meaning = "") {
    this.body = el("tbody");
    this.node = el(
      "table",
      { class: "histogram", title: meaning || null },
      el("caption", {}, title),
      el("thead", { class: "unseen" }, el("tr", {}, el("th", { scope: "col" }, values), el("th", { scope: "col" }, "share"), el("th", { scope: "col" }, things))),
      this.body,
    );
    this.rows = [];
    this.show([]);
  }

  /** [label, num] … */
  show(rows) {
    const shown = rows.length ? rows : [["–", 0]];
    while (this.rows.length < shown.length) this.add();
    while (this.rows.length > shown.length) this.rows.pop().row.remove();
    const sum = shown.reduce((total, [, num]) => total + num, 0), most = Math.max(1, ...shown.map(([, num]) => num));
    shown.forEach(([label, num], at) => {
      const { head, bar, share, count } = this.rows[at];
      say(head, label);
      say(share, sum ? percent(num / sum) : "");
      say(count, integer(num));
      bar.style.width = `${(100 * num) / most}%`;
    });
  }

  add() {
    const head = el("th", { scope: "row" }), bar = el("span", { class: "bar" }), share = el("span", { class: "share" }), count = el("td", { class: "number" });
    const row = el("tr", {}, head, el("td", { class: "bars" }, bar, share), count);
    this.body.append(row);
    this.rows.push({ row, head, bar, share, count });
  }
}
