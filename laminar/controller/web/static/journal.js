// What happened, newest first.

import { by, choice, el, say } from "./dom.js";
import { clock } from "./format.js";

const SHOWN = 200;

export class Journal {
  constructor(model) {
    this.model = model;
    this.kind = "all";
    this.list = el("ol", { class: "journal" });
    this.empty = el("p", { class: "empty" }, "Nothing to tell yet.");
    this.told = el("p", { class: "unseen", role: "status" });
    by("journal").append(this.empty, el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events and alarms" }, this.list), this.told);
    by("journal-tools").append(choice("Show", [["all", "all"], ["alarm", "alarms"]], this.kind, (kind) => this.show(kind)));
  }

  clear() {
    this.shown = 0;
    this.list.replaceChildren();
  }

  show(kind) {
    this.kind = kind;
    this.clear();
    this.update(new Set(["journal"]));
  }

  update(changed) {
    if (!changed.has("journal")) return;
    const rows = this.model.journal.filter(([, kind]) => this.kind === "all" || kind === this.kind);
    this.list.replaceChildren(...rows.slice(-SHOWN).reverse().map(line));
    this.empty.hidden = rows.length > 0;
    say(this.empty, this.kind === "all" ? "Nothing to tell yet." : "No alarm.");
    const alarm = this.model.journal.findLast(([, kind]) => kind === "alarm");
    if (alarm) say(this.told, `Alarm: ${alarm[3].join(" ")}: ${alarm[2].split("\n")[0]}`);
  }
}

function line([at, kind, text, subjects, because]) {
  const [first, ...rest] = text.split("\n");
  return el(
    "li",
    { class: kind },
    el("time", {}, clock(at)),
    el("span", { class: "subjects" }, ...subjects.map(subject)),
    el("span", { class: "what", title: because ? `because of ${because}` : null }, first, rest.length ? el("details", {}, el("summary", {}, "more"), el("pre", {}, rest.join("\n"))) : null),
  );
}

function subject(name) {
  if (/^t\d+\.\d+$/.test(name)) return el("a", { href: `#trajectory/${name}` }, name);
  if (/^g\d+\.\d+$/.test(name)) return el("a", { href: `#group/${name}` }, name);
  if (/^rollout-/.test(name)) return el("a", { href: `#replica/${encodeURIComponent(name)}` }, name);
  return el("span", {}, name);
}
