// Draws the lanes on two canvases: the axis, which stays, and the plot, which may scroll.

import { clock } from "./format.js";
import { DEAD, DRAINING, EVALUATING, GENERATING, GONE, IDLE, QUARANTINED, STARTING, SUSPECT, SYNCING } from "./model.js";
import { colour, versionColour } from "./theme.js";

const AXIS_HEIGHT = 50;
const MARKS_TOP = 18, MARKS_BOTTOM = 34; // when versions became ready
const TRAINER_TOP = 37, TRAINER_HEIGHT = 8; // when the trainer worked
const LANE_MAX = 30, LANE_MIN = 3, PLOT_HEIGHT = 560;
const LABEL_MIN = 11; // lanes at least so high have their name beside them
const ARCS_MAX = 400; // newest; more would be a blot
const TICKS_S = [5, 10, 15, 30, 60, 120, 300];
const FONT = '500 11px Inter, system-ui, sans-serif';

export class LanesCanvas {
  constructor(model) {
    this.model = model;
    this.axis = document.createElement("canvas");
    this.axis.className = "lanes-axis";
    this.axis.setAttribute("aria-hidden", "true");
    this.plot = document.createElement("canvas");
    this.plot.className = "lanes-plot";
  }

  laneAt(y) {
    return this.model.order[Math.floor(y / this.height)] ?? null;
  }

  timeAt(x) {
    const at = this.from + ((x - this.left) / (this.right - this.left)) * (this.until - this.from);
    return at >= this.from && at <= this.until ? at : null;
  }

  topOf(lane) {
    return this.model.place[lane] * this.height;
  }

  x(at) {
    return this.left + ((at - this.from) / (this.until - this.from)) * (this.right - this.left);
  }

  /** All lanes from one moment to another; `chosen` is pointed out. `past`: { segments, moves } instead of what the model has. */
  draw(width, from, until, chosen, past) {
    this.past = past;
    const { lanes } = this.model.sections;
    this.num = lanes.length;
    this.height = Math.max(LANE_MIN, Math.min(LANE_MAX, Math.floor(PLOT_HEIGHT / this.num)));
    this.gap = this.height >= 10 ? 4 : this.height > 5 ? 2 : this.height > 4 ? 1 : 0;
    Object.assign(this, { from, until, width, left: this.nameWidth(lanes), right: Math.max(200, width - 104) });
    this.drawAxis(size(this.axis, width, AXIS_HEIGHT));
    const context = size(this.plot, width, this.num * this.height);
    if (chosen !== null) fill(context, colour("hover"), [[0, this.topOf(chosen), width, this.height]]);
    this.drawSegments(context);
    this.drawMoves(context);
    this.drawNames(context, lanes);
    if (!past) this.drawLoad(context, lanes);
  }

  nameWidth(lanes) {
    return 16 + 6.6 * Math.min(20, lanes.reduce((most, [name]) => Math.max(most, name.length), 0));
  }

  // ---- axis ------------------------------------------------------------------------------------------------

  drawAxis(context) {
    const { from, until, left, right } = this;
    context.font = FONT;
    context.textBaseline = "alphabetic";
    const step = TICKS_S.find((candidate) => ((right - left) * candidate) / (until - from) > 74) ?? 300;
    context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at < until; at += step) {
      if (this.x(at) < right - 30) text(context, clock(at), this.x(at), 12, colour("muted"));
      fill(context, colour("line"), [[Math.round(this.x(at)), AXIS_HEIGHT - 4, 1, 4]]);
    }
    context.textAlign = "left";
    if (!this.past) text(context, "generating, KV", right + 12, 12, colour("muted"));
    this.drawMarks(context);
    this.drawTrainer(context);
  }

  /** Steps that the trainer worked on, the present one with them: what is empty it was idle. */
  trains() {
    if (this.past) return this.past.trains;
    const { trainer } = this.model.sections.progress;
    return trainer.step ? [...this.model.trains, [trainer.since, this.until, `s${trainer.step}`]] : this.model.trains;
  }

  trainAt(at) {
    return this.trains().findLast(([start, end]) => start <= at && at < end);
  }

  drawTrainer(context) {
    const shown = this.trains().filter(([start, end]) => end > this.from && start < this.until);
    const boxes = shown.map(([start, end]) => {
      const begin = Math.max(this.left, this.x(start));
      return [begin, TRAINER_TOP, Math.max(0.5, Math.min(this.right, this.x(end)) - begin - 1), TRAINER_HEIGHT];
    });
    fill(context, colour("line"), [[this.left, TRAINER_TOP + TRAINER_HEIGHT / 2, this.right - this.left, 1]]);
    fill(context, colour("muted"), boxes);
    context.textAlign = "right";
    text(context, "trainer", this.left - 10, TRAINER_TOP + TRAINER_HEIGHT, colour("muted"));
  }

  /** When versions became ready, as far as there is room to say so. */
  drawMarks(context) {
    const shown = this.model.marks.filter(([at, kind]) => at >= this.from && at <= this.until && (kind === "version" || kind === "lost"));
    for (const [at, kind, what] of shown) {
      fill(context, kind === "lost" ? colour("bad") : versionColour(what), [[Math.round(this.x(at)), MARKS_TOP, 2, MARKS_BOTTOM - MARKS_TOP]]);
    }
    let free = this.left;
    for (const [at, kind, what] of shown) {
      const x = Math.round(this.x(at)), wide = context.measureText(what).width;
      if (x < free || kind === "lost" || x + wide > this.right) continue;
      fill(context, colour("paper"), [[x + 2, MARKS_TOP, wide + 6, MARKS_BOTTOM - MARKS_TOP]]); // over the marks that have no room for a word
      text(context, what, x + 5, 30, colour("ink"));
      free = x + 16 + wide;
    }
  }

  // ---- lanes -----------------------------------------------------------------------------------------------

  drawSegments(context) {
    const boxes = new Map(); // colour -> rectangles: setting the colour for each would cost more than filling
    const labels = [];
    for (let lane = 0; lane < this.num; lane += 1) this.placeLane(lane, boxes, labels);
    for (const [style, rectangles] of boxes) {
      const [name, alpha] = style.split("|");
      context.globalAlpha = Number(alpha);
      fill(context, name, rectangles);
    }
    context.globalAlpha = 1;
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const [words, x, y, ink] of labels) text(context, words, x, y, ink);
  }

  placeLane(lane, boxes, labels) {
    const { fleet } = this.model.sections;
    const rows = (this.past ?? this.model).segments[lane] ?? [];
    let first = rows.length;
    while (first > 0 && rows[first - 1][1] > this.from) first -= 1;
    for (let at = first; at < rows.length; at += 1) this.place(lane, rows[at], boxes, labels);
    if (this.past) return;
    this.place(lane, [fleet.since[lane], this.until, fleet.activity[lane], fleet.version[lane]], boxes, labels);
  }

  place(lane, [start, end, activity, version], boxes, labels) {
    const begin = Math.max(this.left, this.x(start)), until = Math.min(this.right, this.x(end));
    if (until < begin || activity === GONE) return;
    const [style, alpha, share] = look(activity, version, this.height < LABEL_MIN);
    const whole = this.height - this.gap, high = Math.max(1, Math.round(whole * share));
    const x = Math.round(2 * begin) / 2, wide = Math.max(activity === SYNCING ? 1 : 0.5, until - begin);
    const y = this.topOf(lane) + this.gap / 2 + Math.floor((whole - high) / 2);
    const key = `${style}|${alpha}`;
    let rectangles = boxes.get(key);
    if (!rectangles) boxes.set(key, (rectangles = []));
    rectangles.push([x, y, wide, high]);
    const labelled = activity === GENERATING || activity === DRAINING;
    if (labelled && high >= 12 && wide > 10 + 6.5 * version.length) {
      labels.push([version, x + 5, y + high / 2 + 0.5, colour("on-version")]);
    }
  }

  drawMoves(context) {
    context.strokeStyle = context.fillStyle = colour("ink");
    const shown = (this.past ?? this.model).moves.filter(([at]) => at > this.from && at < this.until).slice(-ARCS_MAX);
    const faint = Math.min(0.7, 0.14 + 12 / (shown.length + 1)); // many arcs are a texture, few are to be followed
    for (const [at, source, destination, num] of shown) {
      const x = this.x(at), from = this.topOf(source) + this.height / 2, to = this.topOf(destination) + this.height / 2;
      const wide = Math.min(36, 6 + Math.abs(to - from) * 0.35), bulge = x + wide < this.right ? wide : -wide;
      context.globalAlpha = faint;
      context.lineWidth = Math.min(2.6, (0.5 + 0.7 * Math.log10(num + 1)) * (this.height < LABEL_MIN ? 0.6 : 1));
      context.beginPath();
      context.moveTo(x, from);
      context.bezierCurveTo(x + bulge, from, x + bulge, to, x, to);
      context.stroke();
      if (this.height < LABEL_MIN) continue;
      context.globalAlpha = 1;
      context.beginPath();
      context.arc(x, to, 2.5, 0, 2 * Math.PI);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  drawNames(context, lanes) {
    const every = this.height < LABEL_MIN ? Math.ceil((LABEL_MIN + 2) / this.height) : 1;
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let place = 0; place < this.num; place += every) {
      const lane = this.model.order[place], [name] = lanes[lane];
      text(context, name.length > 20 ? `…${name.slice(-19)}` : name, this.left - 10, Math.max(6, this.topOf(lane) + this.height / 2 + 0.5), colour("muted"));
    }
  }

  /** What each replica has to do now, and how full its KV cache is. */
  drawLoad(context, lanes) {
    const { fleet } = this.model.sections;
    const x = this.right + 12, wide = this.width - x - (this.height >= LABEL_MIN ? 34 : 4);
    const full = [], used = [], high = [];
    for (let lane = 0; lane < this.num; lane += 1) {
      const share = lanes[lane][2] ? Math.min(1, fleet.kv[lane] / lanes[lane][2]) : 0;
      const thick = Math.max(2, Math.min(6, this.height - 2)), y = this.topOf(lane) + (this.height - thick) / 2;
      full.push([x, y, wide, thick]);
      (share > 0.9 ? high : used).push([x, y, wide * share, thick]);
    }
    fill(context, colour("line"), full);
    fill(context, colour("accent"), used);
    fill(context, colour("warn"), high);
    if (this.height < LABEL_MIN) return;
    context.textAlign = "right";
    for (let lane = 0; lane < this.num; lane += 1) {
      text(context, String(fleet.generating[lane]), this.width - 4, this.topOf(lane) + this.height / 2 + 0.5, colour("ink"));
    }
  }
}

/** [colour, alpha, share of the lane's height] of an activity; in a lane that is too low to be divided, paler instead of thinner. */
function look(activity, version, isLow) {
  switch (activity) {
    case GENERATING: return [versionColour(version), 1, 1];
    case DRAINING: return isLow ? [versionColour(version), 0.6, 1] : [versionColour(version), 1, 0.5];
    case SYNCING: return [colour("ink"), 1, 1];
    case IDLE: return [colour("muted"), isLow ? 0.28 : 0.55, 0.08];
    case STARTING:
    case EVALUATING: return [colour("muted"), 0.4, 0.4];
    case SUSPECT:
    case QUARANTINED: return [colour("warn"), 1, 0.7];
    case DEAD: return [colour("bad"), 1, 0.5];
    default: return [colour("line"), 1, 0.2];
  }
}

/** A canvas of this size in CSS pixels, empty. */
function size(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function fill(context, style, rectangles) {
  context.fillStyle = style;
  for (const [x, y, wide, high] of rectangles) context.fillRect(x, y, wide, high);
}

function text(context, words, x, y, ink) {
  context.fillStyle = ink;
  context.fillText(words, x, y);
}
