// The table of replicas: what the lanes show, in words and numbers. A cell is touched only when its value has changed.

import { by, el, say } from "./dom.js";
import { NONE, duration, integer, percent, plural } from "./format.js";
import { ACTIVITIES, DEAD, DRAINING, GENERATING, GONE, QUARANTINED, SUSPECT } from "./model.js";

// Of each column: heading, whether it is a number, its text, and what it is sorted by.
const COLUMNS = [
  ["replica", false, (r) => r.name, (r) => r.place],
  ["state", false, (r) => r.state, (r) => r.activity],
  ["version", false, (r) => r.version || NONE, (r) => age(r.version)],
  ["for", true, (r) => duration(r.for_s), (r) => r.for_s],
  ["generating", true, (r) => integer(r.generating), (r) => r.generating],
  ["rewarding", true, (r) => integer(r.rewarding), (r) => r.rewarding],
  ["KV tokens", true, (r) => integer(r.kv), (r) => r.kv],
  ["KV", true, (r) => percent(r.kv_share), (r) => r.kv_share ?? -1],
  ["busy", true, (r) => percent(r.busy), (r) => r.busy],
  ["restarts", true, (r) => integer(r.restarts), (r) => r.restarts],
];
const ROUND_S = 1; // "for" moves on so often
const ROWS_AT_ONCE = 64; // made in one go

export class Fleet {
  constructor(model) {
    this.model = model;
    this.rows = [];
    this.sorted = 0;
    this.descending = false;
    this.filter = "";
    this.records = [];
    this.heads = COLUMNS.map(([heading, isNumber], at) => el("th", { scope: "col", class: isNumber ? "number" : null }, el("button", { type: "button", click: () => this.sort(at) }, heading)));
    this.body = el("tbody");
    this.heads[0].setAttribute("aria-sort", "ascending");
    const table = el("table", { class: "fleet" }, el("caption", { class: "unseen" }, "Replicas"), el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.summary = el("p", { class: "plain" }, "No replica has joined yet.");
    this.box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of replicas" }, table);
    by("fleet").append(this.summary, this.box);
    const filter = el("input", { type: "search", id: "fleet-filter", placeholder: "name, state or version", input: () => this.narrow(filter.value) });
    by("fleet-tools").append(el("label", { for: "fleet-filter", class: "unseen" }, "Show replicas with"), filter);
  }

  /** The controller that comes next may have other replicas. */
  clear() {
    this.rows = [];
    this.records = [];
    this.body.replaceChildren();
  }

  update(changed) {
    if (!changed.has("fleet") && !changed.has("lanes")) return;
    const { lanes, fleet } = this.model.sections;
    const now = this.model.at;
    const records = lanes.map((_, lane) => record(lane, this.model.place[lane], lanes, fleet, now));
    const wanted = Math.min(records.length, this.rows.length + ROWS_AT_ONCE);
    while (this.rows.length < wanted) this.add();
    this.rows.forEach((row, lane) => this.show(row, records[lane]));
    this.records = records;
    this.summarize(records);
    if (this.sorted || this.filter || changed.has("lanes")) this.arrange();
    return this.rows.length < records.length; // the rest with the next frame
  }

  add() {
    const cells = COLUMNS.map(([, isNumber], at) => el(at ? "td" : "th", { class: isNumber ? "number" : null, scope: at ? null : "row" }));
    const link = el("a");
    cells[0].append(link);
    const node = el("tr", {}, ...cells);
    this.body.append(node);
    this.rows.push({ node, cells, link, known: COLUMNS.map(() => null), activity: null });
  }

  show(row, r) {
    COLUMNS.forEach(([, , text], at) => {
      const value = text(r);
      if (row.known[at] === value) return;
      row.known[at] = value;
      say(at ? row.cells[at] : row.link, value);
      if (!at) row.link.href = `#replica/${encodeURIComponent(r.name)}`;
    });
    if (row.activity !== r.activity) row.node.className = [SUSPECT, QUARANTINED].includes(r.activity) ? "warn" : r.activity === DEAD ? "bad" : r.activity === GONE ? "gone" : "";
    row.activity = r.activity;
  }

  summarize(records) {
    const there = records.filter((r) => r.activity !== GONE);
    const counts = new Map();
    for (const r of there) counts.set(r.activity, (counts.get(r.activity) ?? 0) + 1);
    const parts = [...counts].sort(([a], [b]) => a - b).map(([activity, num]) => `${integer(num)} ${ACTIVITIES[activity]}`);
    const versions = new Set(there.filter((r) => r.activity === GENERATING || r.activity === DRAINING).map((r) => r.version));
    say(this.summary, there.length ? `${plural(there.length, "replica")}: ${parts.join(", ")}. ${plural(versions.size, "version")} in use.` : "No replica has joined yet.");
  }

  sort(at) {
    this.descending = this.sorted === at && !this.descending;
    this.sorted = at;
    this.heads.forEach((head, other) => {
      if (other === at) head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.arrange();
  }

  narrow(text) {
    this.filter = text.trim().toLowerCase();
    this.arrange();
  }

  /** Rows in the order that is wanted; nothing is touched that is in place. */
  arrange() {
    const by = COLUMNS[this.sorted][3], sign = this.descending ? -1 : 1;
    const order = this.records.slice(0, this.rows.length).toSorted((a, b) => sign * (by(a) - by(b)) || a.place - b.place);
    order.forEach((r, place) => {
      const { node } = this.rows[r.lane];
      node.hidden = !`${r.name} ${r.state} ${r.version}`.toLowerCase().includes(this.filter);
      if (this.body.children[place] !== node) this.body.insertBefore(node, this.body.children[place] ?? null);
    });
  }
}

const BRANCHES_MAX = 1e4;

/** What versions are sorted by: step, then branch; none comes first. */
function age(version) {
  const [, step, branch] = /^v(\d+)(?:\.b(\d+))?$/.exec(version) ?? [null, -1, 0];
  return Number(step) * BRANCHES_MAX + Number(branch ?? 0);
}

function record(lane, place, lanes, fleet, now) {
  const [name, , kv_max] = lanes[lane];
  const activity = fleet.activity[lane];
  return {
    lane,
    place,
    name,
    activity,
    state: ACTIVITIES[activity],
    version: fleet.version[lane],
    for_s: Math.max(0, Math.floor((now - fleet.since[lane]) / ROUND_S) * ROUND_S),
    generating: fleet.generating[lane],
    rewarding: fleet.rewarding[lane],
    kv: fleet.kv[lane],
    kv_share: kv_max ? fleet.kv[lane] / kv_max : null,
    busy: fleet.busy[lane],
    restarts: fleet.restarts[lane],
  };
}
