// Version lanes: a row for each replica, time from left to right, moves as arcs. Drawn by lanes_canvas.js.

import { by, choice, el, say } from "./dom.js";
import { clock, duration, integer, percent, plural } from "./format.js";
import { ACTIVITIES, GONE } from "./model.js";
import { LanesCanvas } from "./lanes_canvas.js";
import * as theme from "./theme.js";

const WINDOWS_S = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];
const LEGEND = [
  ["generates", "key-solid"],
  ["drains: begins nothing new", "key-pale"],
  ["pulls weights", "key-ink"],
  ["idle", "key-line"],
  ["starting, evaluates", "key-hatch"],
  ["suspect, quarantined", "key-warn"],
  ["dead", "key-bad"],
  ["trajectories move", "key-arc"],
  ["trainer at a step", "key-step"],
];

export class Lanes {
  constructor(model) {
    this.model = model;
    this.window_s = 60;
    this.chosen = null; // lane by keyboard or pointer
    this.canvas = new LanesCanvas(model);
    this.tip = el("div", { class: "tip", hidden: true });
    this.told = el("p", { class: "unseen", "aria-live": "polite" });
    this.empty = el("p", { class: "empty" }, "No replica has joined yet.");
    const plot = this.canvas.plot;
    plot.setAttribute("tabindex", "0");
    plot.setAttribute("role", "application"); // so that arrow keys reach it, whatever reads the screen
    plot.setAttribute("aria-roledescription", "lanes");
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.choose(null));
    plot.addEventListener("click", (event) => {
      this.point(event); // a finger does not move before
      this.open();
    });
    plot.addEventListener("keydown", (event) => this.key(event));
    plot.addEventListener("blur", () => this.choose(null));
    this.canvas.axis.addEventListener("pointermove", (event) => this.pointAtTrainer(event));
    this.canvas.axis.addEventListener("pointerleave", () => this.choose(null));
    this.box = el("div", { class: "lanes-box" }, plot);
    this.moved = el("p", { class: "aside" });
    by("lanes").append(this.empty, this.canvas.axis, this.box, this.tip, this.told, legend(), this.moved);
    this.past = null; // what is shown of earlier times: { until, segments, trains, moves }
    this.when = el("span", { class: "aside", role: "status" });
    const earlier = el("button", { type: "button", click: () => this.go(-1) }, "earlier");
    this.later = el("button", { type: "button", click: () => this.go(1) }, "later");
    this.live = el("button", { type: "button", click: () => this.show(this.window_s) }, "now");
    by("lanes-tools").append(this.when, earlier, this.later, this.live, choice("Time shown", WINDOWS_S, this.window_s, (window_s) => this.show(window_s)));
    this.show(this.window_s);
    new ResizeObserver(() => this.draw()).observe(by("lanes"));
    theme.onChange(() => this.draw());
  }

  /** The controller that comes next may have other replicas. */
  clear() {
    this.chosen = null;
    this.tip.hidden = true;
    this.show(this.window_s);
  }

  /** So many seconds up to now. */
  show(window_s) {
    this.window_s = window_s;
    this.past = null;
    this.later.hidden = this.live.hidden = true;
    say(this.when, "");
    this.draw();
  }

  /** A window back or forth: what the page does not have any more is read from the run's database. */
  async go(direction) {
    const until = (this.past?.until ?? this.model.now()) + direction * this.window_s;
    if (until >= this.model.now()) return this.show(this.window_s);
    const { began } = this.model.sections;
    if (until <= began) return say(this.when, `the run began at ${clock(began)}`);
    const { window_s, past: before } = this;
    say(this.when, "looking it up");
    const past = await look(until - window_s, until);
    if (before !== this.past || window_s !== this.window_s) return; // somebody has gone elsewhere meanwhile
    say(this.when, past.error ?? `${clock(until - window_s)} to ${clock(until)}, as decoded`);
    if (past.error) return;
    const lanes = this.model.sections.lanes.map(([name]) => name);
    this.past = {
      until,
      segments: lanes.map((name) => past.lanes[name] ?? []),
      trains: past.trains,
      moves: past.moves.map(([at, source, destination, num]) => [at, lanes.indexOf(source), lanes.indexOf(destination), num]).filter(([, source, destination]) => source >= 0 && destination >= 0),
    };
    this.later.hidden = this.live.hidden = false;
    this.draw();
  }

  update(changed) {
    this.draw();
    if (changed.has("lanes")) this.describe();
    if (changed.has("repack")) say(this.moved, repacked(this.model.sections.repack));
  }

  draw() {
    const num = this.model.sections.lanes?.length ?? 0;
    this.empty.hidden = num > 0;
    this.box.hidden = this.canvas.axis.hidden = num === 0;
    const until = this.past?.until ?? this.model.now();
    if (num) this.canvas.draw(by("lanes").clientWidth, until - this.window_s, until, this.chosen, this.past);
  }

  describe() {
    const num = this.model.sections.lanes.length;
    this.canvas.plot.setAttribute(
      "aria-label",
      `Lanes of ${num} replicas over the last ${duration(this.window_s)}. Arrow keys choose a replica, Enter opens it; the table of replicas has the same in words.`,
    );
  }

  point(event) {
    const lane = this.canvas.laneAt(event.offsetY);
    this.choose(lane, this.canvas.timeAt(event.offsetX), event);
  }

  /** What the trainer did then. */
  pointAtTrainer(event) {
    const at = this.canvas.timeAt(event.offsetX);
    if (at === null) return this.choose(null);
    const train = this.canvas.trainAt(at);
    const words = train ? `step ${train[2].slice(1)} for ${duration(train[1] - train[0])}, from ${clock(train[0])}` : `idle at ${clock(at)}`;
    this.tell([el("b", {}, "trainer"), ` ${words}`], event);
  }

  choose(lane, at = null, event = null) {
    if (lane !== this.chosen) {
      this.chosen = lane;
      this.draw();
    }
    if (lane === null) this.tip.hidden = true;
    else this.tell(this.describeAt(lane, at), event, this.canvas.topOf(lane));
  }

  /** Words where the pointer is; without one, beside what begins at `top`. */
  tell(words, event, top = 0) {
    this.tip.hidden = false;
    this.tip.replaceChildren(...words);
    const box = by("lanes").getBoundingClientRect();
    const x = event ? event.clientX - box.left : this.canvas.left;
    const y = event ? event.clientY - box.top : top - this.box.scrollTop + this.box.offsetTop;
    this.tip.style.left = `${Math.min(x + 14, box.width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  describeAt(lane, at) {
    const { lanes, fleet } = this.model.sections;
    const [name, host, kv_max] = lanes[lane];
    const now = `${integer(fleet.generating[lane])} generating, ${integer(fleet.rewarding[lane])} with a reward to come, KV ${percent(kv_max ? fleet.kv[lane] / kv_max : null)}`;
    const lines = [el("b", {}, name), ` on ${host || "–"}`, el("br"), this.words(lane, at), el("br"), `now: ${now}`];
    const reason = fleet.reasons[lane];
    return reason ? [...lines, el("br"), reason] : lines;
  }

  /** What the lane did at a moment; null = now. */
  words(lane, at) {
    const { fleet } = this.model.sections;
    const segments = (this.past?.segments ?? this.model.segments)[lane] ?? [];
    const past = at === null ? null : segments.find(([start, end]) => start <= at && at < end);
    if (!past && this.past) return at === null ? "" : `nothing recorded at ${clock(at)}`;
    const [start, end, activity, version] = past ?? [fleet.since[lane], null, fleet.activity[lane], fleet.version[lane]];
    const what = `${ACTIVITIES[activity]}${version && activity < GONE ? ` ${version}` : ""}`;
    return end === null ? `${what}, since ${clock(start)}` : `${what} for ${duration(end - start)}, ${clock(start)} to ${clock(end)}`;
  }

  key(event) {
    const num = this.model.sections.lanes.length;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 16, PageUp: -16, Home: -num, End: num }[event.key];
    if (event.key === "Enter") this.open();
    else if (event.key === "Escape") this.choose(null);
    else if (step) {
      event.preventDefault();
      const place = this.chosen === null ? (step > 0 ? -1 : num) : this.model.place[this.chosen];
      this.choose(this.model.order[Math.max(0, Math.min(num - 1, place + step))]);
      this.reveal();
      say(this.told, `${this.model.sections.lanes[this.chosen][0]}: ${this.words(this.chosen, null)}`);
    }
  }

  /** Scroll so that the chosen lane is seen. */
  reveal() {
    const top = this.canvas.topOf(this.chosen), bottom = top + this.canvas.height;
    this.box.scrollTop = Math.max(bottom - this.box.clientHeight, Math.min(this.box.scrollTop, top));
    this.choose(this.chosen);
  }

  open() {
    if (this.chosen !== null) location.hash = `#replica/${encodeURIComponent(this.model.sections.lanes[this.chosen][0])}`;
  }
}

async function look(from, to) {
  try {
    const answer = await fetch(`/v1/dashboard/lanes?from=${from}&to=${to}`, { cache: "no-store" });
    return await answer.json();
  } catch {
    return { error: "the controller does not answer" };
  }
}

function repacked({ checks, moves, emptied, moved_tokens }) {
  if (!checks) return "";
  return `Repack so far: ${plural(checks, "check")} moved ${plural(moves, "trajectory", "trajectories")} and emptied ${plural(emptied, "replica")}; ${plural(moved_tokens, "token")} prefilled again.`;
}

function legend() {
  return el("ul", { class: "legend" }, ...LEGEND.map(([text, key]) => el("li", {}, el("span", { class: `key ${key}` }), text)));
}
