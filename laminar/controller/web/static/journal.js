// What happened, newest first.

import { by, choice, el, say } from "./dom.js";
import { clock } from "./format.js";

const SHOWN = 200;
const SHOW = [["event", "what is out of the ordinary"], ["step", "also each step"], ["alarm", "alarms"]];

export class Journal {
  constructor(model) {
    this.model = model;
    this.kind = "event";
    this.newest = null; // row that is shown on top
    this.list = el("ol", { class: "journal" });
    this.empty = el("p", { class: "empty" }, "Nothing to tell yet.");
    this.told = el("p", { class: "unseen", role: "status" });
    by("journal").append(this.empty, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events and alarms" }, this.list), this.told);
    by("journal-tools").append(choice("Show", SHOW, this.kind, (kind) => this.show(kind)));
  }

  clear() {
    this.newest = null;
    this.list.replaceChildren();
  }

  show(kind) {
    this.kind = kind;
    this.clear();
    this.update(new Set(["journal"]));
  }

  update(changed) {
    if (!changed.has("journal") && !(changed.has("routine") && this.kind === "step")) return;
    const rows = this.rows();
    this.add(rows);
    this.empty.hidden = rows.length > 0;
    say(this.empty, this.kind === "alarm" ? "No alarm." : "Nothing to tell yet.");
    const alarm = this.model.journal.findLast(([, kind]) => kind === "alarm");
    if (alarm) say(this.told, `Alarm: ${alarm[3].join(" ")}: ${alarm[2].split("\n")[0]}`);
  }

  /** Those that were asked for, oldest first. */
  rows() {
    const { journal, routine } = this.model;
    if (this.kind === "step") return [...journal, ...routine].sort((a, b) => a[0] - b[0]);
    return this.kind === "alarm" ? journal.filter(([, kind]) => kind === "alarm") : journal;
  }

  /** What is new, on top of the rest: an alarm that somebody has opened stays open. */
  add(rows) {
    const replicas = new Set((this.model.sections.lanes ?? []).map(([name]) => name));
    const known = this.kind === "step" ? -1 : rows.lastIndexOf(this.newest); // where two lists meet, rows come in between
    if (known < 0) this.clear();
    const added = rows.slice(Math.max(known + 1, rows.length - SHOWN));
    this.list.prepend(...added.reverse().map((row) => line(row, replicas)));
    while (this.list.childElementCount > SHOWN) this.list.lastElementChild.remove();
    this.newest = rows.at(-1) ?? null;
  }
}

function line([at, kind, text, subjects, because], replicas) {
  const [first, ...rest] = text.split("\n");
  return el(
    "li",
    { class: kind },
    el("time", {}, clock(at)),
    el("span", { class: "subjects" }, ...subjects.map((name) => subject(name, replicas))),
    el("span", { class: "what", title: because ? `because of ${because}` : null }, first, rest.length ? el("details", {}, el("summary", {}, "more"), el("pre", {}, rest.join("\n"))) : null),
  );
}

function subject(name, replicas) {
  if (/^t\d+\.\d+$/.test(name)) return el("a", { href: `#trajectory/${name}` }, name);
  if (/^g\d+\.\d+$/.test(name)) return el("a", { href: `#group/${name}` }, name);
  if (replicas.has(name)) return el("a", { href: `#replica/${encodeURIComponent(name)}` }, name);
  return el("span", {}, name);
}
