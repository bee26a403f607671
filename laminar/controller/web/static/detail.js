// One replica, group or trajectory, beside the page: chosen by the address, so that it can be sent to somebody.

import { by, el, table } from "./dom.js";
import { NONE, clock, duration, fixed, integer, known, visible } from "./format.js";
import { strip } from "./samples.js";
import { text as shadedText } from "./trajectory.js";

const AGAIN_MS = 2000; // what is open is looked up so often while it lives
const KINDS = { replica, group, trajectory };

export class Detail {
  constructor(model) {
    this.model = model;
    this.node = by("detail");
    this.last = null; // what had the focus before
    this.timer = null;
    this.wanted = []; // kind and id of what is open
    this.opened = 0; // so often something was opened: an answer to an earlier question is not shown
    addEventListener("hashchange", () => this.open());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !this.node.hidden) this.close();
    });
    this.open();
  }

  update() {}

  open() {
    const [kind, id] = asked(location.hash);
    if (!kind) return this.hide();
    clearTimeout(this.timer);
    this.opened += 1;
    if (this.node.hidden) this.last = document.activeElement;
    this.node.hidden = false;
    this.body = el("div", { class: "detail-body" }, el("p", { class: "empty" }, "looking it up"));
    const title = el("h2", { id: "detail-title" }, id);
    this.node.replaceChildren(el("div", { class: "heading" }, title, el("button", { type: "button", click: () => this.close() }, "Close")), this.body);
    this.node.focus();
    this.from = 0; // first token shown
    this.wanted = [kind, id];
    this.look(this.opened);
  }

  /** Another controller, or the same after a login, may know what the last one did not. */
  clear() {
    clearTimeout(this.timer);
    this.opened += 1;
    if (!this.node.hidden) this.look(this.opened);
  }

  close() {
    history.pushState(null, "", location.pathname);
    this.hide();
  }

  hide() {
    clearTimeout(this.timer);
    this.opened += 1;
    this.node.hidden = true;
    if (this.last) (this.last.isConnected ? this.last : by("main")).focus(); // what it was in may have been drawn anew
    this.last = null;
  }

  async look(opened) {
    const [kind, id] = this.wanted;
    const { answer, told, again } = await ask(`/v1/dashboard/${kind}/${encodeURIComponent(id)}?from=${this.from}`);
    if (opened !== this.opened) return;
    const show = (from) => {
      this.from = from;
      this.node.focus();
      clearTimeout(this.timer);
      this.look(opened);
    };
    if (!this.isBeingRead()) this.body.replaceChildren(...(told ? KINDS[kind](answer, show) : [el("p", { class: "error" }, answer.error)]));
    if (again) this.timer = setTimeout(() => this.look(opened), AGAIN_MS);
  }

  /** Text that somebody marks, or an opened part, is left alone. */
  isBeingRead() {
    const marked = getSelection();
    return (!marked.isCollapsed && this.node.contains(marked.anchorNode)) || this.body.contains(document.activeElement);
  }
}

/** [kind, id] that the address names; [] = none. */
function asked(address) {
  const [, kind, id] = /^#(replica|group|trajectory)\/(.+)$/.exec(address) ?? [];
  try {
    return kind ? [kind, decodeURIComponent(id)] : [];
  } catch {
    return [kind, id]; // a % that begins no escape
  }
}

/** The answer, whether it is what was asked for, and whether another may come later. */
async function ask(path) {
  try {
    const answer = await fetch(path, { cache: "no-store" });
    if (answer.status === 401) dispatchEvent(new Event("laminar:refused"));
    const known = await answer.json();
    return { answer: known, told: answer.ok, again: answer.ok ? known.live : answer.status >= 500 };
  } catch {
    return { answer: { error: "The controller does not answer." }, told: false, again: true };
  }
}

// ---- what is shown -----------------------------------------------------------------------------------------

function replica(r) {
  return [
    ...why(r.why),
    r.host ? facts([["host", r.host]]) : null,
    el("h3", {}, "What it has"),
    r.trajectories.length ? members(r.trajectories, true) : el("p", { class: "empty" }, "nothing"),
    r.more ? el("p", { class: "aside" }, `and ${integer(r.more)} more`) : null,
    ...story(r.story),
  ].filter(Boolean);
}

function group(g) {
  return [
    ...why(g.why),
    facts([
      ["prompt", `${integer(g.prompt)} of the data set`],
      ["version", g.version ?? NONE],
      ["replica", g.worker ? el("a", { href: `#replica/${encodeURIComponent(g.worker)}` }, g.worker) : NONE],
      ["rewards", strip(g.trajectories.map((t) => t.reward))],
      ["answer expected", visible(g.answer) || NONE],
    ]),
    el("h3", {}, "Prompt"),
    el("pre", { class: "text" }, visible(g.prompt_text)),
    el("h3", {}, "Siblings"),
    members(g.trajectories, false),
    ...story(g.story),
  ];
}

function trajectory(t, show) {
  return [
    ...why(t.why),
    facts([
      ["group", el("a", { href: `#group/${t.group}` }, t.group)],
      ["reward", `${fixed(t.reward, 3)}${parts(t.reward_parts)}`],
      ["ended", t.finish_reason || t.failure || "not yet"],
      ["versions", `generated by ${t.behavior_version ?? NONE}, finished at ${t.finish_version ?? NONE}, sampled at ${t.sample_version ?? NONE}`],
      ["staleness", `s_gen ${t.s_gen ?? NONE}, residence ${t.residence ?? NONE}, s_train ${t.s_train ?? NONE}`],
      ["times", times(t.timings)],
    ]),
    ...shadedText(t, show),
    ...story(t.story),
  ];
}

/** The controller's own explanation: a sentence, and what it rests on. */
function why({ text, lines }) {
  return [
    el("p", { class: "lead" }, `${text}.`),
    lines.length ? el("dl", { class: "facts" }, ...lines.flatMap(([topic, words]) => [el("dt", {}, topic), el("dd", {}, words)])) : null,
  ].filter(Boolean);
}

const parts = (given) => {
  const words = Object.entries(given ?? {}).map(([name, value]) => `${name} ${fixed(value, 3)}`);
  return words.length ? ` (${words.join(", ")})` : "";
};

/** When it was drawn, and how long each part took. */
function times(timings) {
  let last = timings.queued;
  if (!last) return NONE;
  const words = [`drawn ${clock(last)}`];
  for (const [name, what] of [["first_token", "first token"], ["finished", "last token"], ["rewarded", "reward"], ["sampled", "sampled"], ["trained", "trained"]]) {
    if (!timings[name]) continue;
    words.push(`${what} +${duration(Math.max(0, timings[name] - last))}`);
    last = timings[name];
  }
  return words.join(", ");
}

function facts(rows) {
  return el("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function members(trajectories, withGroup) {
  const headings = ["trajectory", ...(withGroup ? ["group"] : []), "state", "tokens", "reward", "ended"];
  const rows = trajectories.map((t) => [
    el("a", { href: `#trajectory/${t.id}` }, t.id),
    ...(withGroup ? [el("a", { href: `#group/${t.group}` }, t.group)] : []),
    t.state,
    integer(t.num_tokens),
    known(t.reward) ? fixed(t.reward, 3) : NONE,
    t.finish_reason || t.failure || NONE,
  ]);
  const numbers = withGroup ? [3, 4] : [2, 3];
  return table("Trajectories", headings, rows, numbers);
}

function story(rows) {
  if (!rows.length) return [];
  const lines = rows.map((row) => el("li", {}, el("time", {}, clock(row.at)), el("span", { class: "what" }, row.text), el("span", { class: "because" }, row.because)));
  return [el("h3", {}, "Story"), el("ol", { class: "story" }, ...lines)];
}
