// What each train step measured, as small curves with one cursor.

import uPlot from "./vendor/uPlot.esm.js";
import { by, choice, el, say } from "./dom.js";
import { NONE, integer, known, number, percent } from "./format.js";
import * as theme from "./theme.js";

const HEIGHT = 132;
const CURVES_AT_ONCE = 4; // made or drawn in one go
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]); // steps between ticks of steps
const MEANS = [[1, "each step"], [10, "mean of 10"], [50, "of 50"]];
// At step 1 they contain the start of the workers, beside which nothing else would be seen.
const WITH_START = new Set(["timing/wall_s", "timing/trajectory_s/mean", "timing/trajectory_s/max", "perf/trainer_idle_ratio", "perf/rollout_idle_ratio"]);
// Of each: title, [metric, name, colour] …, how a value is written.
const CURVES = [
  ["Reward", [["reward/mean", "mean", "ink"], ["reward/std", "spread", "second"]], number],
  ["Response length, tokens", [["response_length/mean", "mean", "ink"]], number],
  ["Staleness, steps", [["off_policy/s_train/mean", "mean", "ink"], ["off_policy/s_train/max", "most", "second"]], number],
  ["Tokens/s", [["perf/generation_tokens_per_s", "generated", "ink"], ["perf/training_tokens_per_s", "trained", "second"]], integer],
  ["Entropy, nats/token", [["actor/entropy", "mean", "ink"]], number],
  ["KL, nats/token", [["actor/ppo_kl", "update", "ink"], ["mismatch_kl/mean", "engine–trainer", "second"]], number],
  ["Importance ratio", [["importance_ratio/mean", "mean", "ink"], ["importance_ratio/max", "most", "second"]], number],
  ["Clipped tokens", [["actor/pg_clipfrac", "share", "ink"]], percent],
  ["Gradient norm", [["actor/grad_norm", "before clipping", "ink"]], number],
  ["Policy loss", [["actor/pg_loss", "mean", "ink"]], number],
  ["Learning rate", [["actor/lr", "last update", "ink"]], number],
  ["Groups without a signal", [["advantage/zero_fraction", "share", "ink"]], percent],
  ["Truncated answers", [["is_truncated/mean", "share", "ink"]], percent],
  ["Idle", [["perf/trainer_idle_ratio", "trainer", "ink"], ["perf/rollout_idle_ratio", "rollouts", "second"]], percent],
  ["Step, s", [["timing/wall_s", "all", "ink"], ["timing/step_s", "training", "second"]], number],
  ["Trajectory, s", [["timing/trajectory_s/mean", "mean", "ink"], ["timing/trajectory_s/max", "most", "second"]], number],
  ["Weight stalls, s", [["perf/publication_stall_s", "trainer", "ink"], ["perf/rollout_wait_s", "a replica", "second"]], number],
  ["Buffer, groups", [["buffer/depth_groups", "after the step", "ink"]], integer],
  ["Controller’s loop lag, s", [["event_loop_lag/max", "most", "ink"]], number],
];

export class Curves {
  constructor(model) {
    this.model = model;
    this.empty = el("p", { class: "empty" }, "No train step has finished yet.");
    by("curves").append(this.empty);
    by("curves-tools").append(choice("Each point is", MEANS, 1, (num) => this.smooth(num)));
    this.num = 1; // steps that a point is the mean of
    this.curves = [];
    this.last = null; // step up to which they show
    this.stale = new Set(); // those that do not show it yet
    this.sync = uPlot.sync("steps");
    theme.onChange(() => this.rebuild());
    new ResizeObserver(() => this.resize()).observe(by("curves"));
  }

  clear() {
    this.rebuild();
  }

  update(changed) {
    if (!changed.has("steps") && !changed.has("metric_names")) return;
    this.empty.hidden = this.model.steps.length > 0;
    if (!this.model.steps.length) return false;
    const last = this.model.steps.at(-1);
    if (last !== this.last) this.stale = new Set(this.curves);
    this.last = last;
    this.build();
    for (const curve of [...this.stale].slice(0, CURVES_AT_ONCE)) {
      curve.show(this.model, this.num);
      this.stale.delete(curve);
    }
    return this.stale.size > 0 || this.curves.length < CURVES.length; // the rest with the next frame
  }

  /** Some more of them, as long as not all are there. */
  build() {
    const missing = CURVES.slice(this.curves.length, this.curves.length + CURVES_AT_ONCE);
    const made = missing.map(([title, series, write]) => new Curve(title, series, write, this.sync.key));
    by("curves").append(...made.map((curve) => curve.figure));
    this.curves.push(...made);
    for (const curve of made) {
      curve.resize();
      this.stale.add(curve);
    }
  }

  rebuild() {
    for (const curve of this.curves) curve.remove();
    this.curves = [];
    this.redraw();
  }

  smooth(num) {
    this.num = num;
    this.redraw();
  }

  redraw() {
    this.stale = new Set(this.curves);
    while (this.update(new Set(["steps"])));
  }

  resize() {
    for (const curve of this.curves) curve.resize();
  }
}

class Curve {
  constructor(title, series, write, key) {
    this.series = series;
    this.write = write;
    this.values = series.map(([, name, ink]) => el("span", { class: `value ${ink}`, title: name }, NONE));
    const values = this.values.map((value, at) => (series.length > 1 ? el("span", { class: `named ${series[at][2]}` }, `${series[at][1]} `, value) : value));
    this.at = el("span", { class: "at" });
    this.box = el("div", { class: "curve-box", role: "img" });
    this.figure = el("figure", { class: "curve" }, el("figcaption", {}, el("b", {}, title), el("span", { class: "values" }, this.at, ...values)), this.box);
    this.title = title;
    this.plot = new uPlot(this.options(key), [[], ...series.map(() => [])], this.box);
  }

  options(key) {
    const axis = { stroke: theme.colour("muted"), grid: { stroke: theme.colour("line"), width: 1 }, ticks: { show: false }, font: "11px Inter, system-ui, sans-serif" };
    return {
      width: 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key, setSeries: false }, points: { size: 5 }, y: false },
      scales: { x: { time: false }, y: { range: (_, least, most) => range(least, most) } },
      axes: [
        { ...axis, grid: { show: false }, size: 22, gap: 4, space: 60, incrs: WHOLE },
        { ...axis, size: 44, gap: 4, space: 34, values: (_, splits) => splits.map((value) => this.write(value)) },
      ],
      series: [{}, ...this.series.map(([, , ink]) => ({ stroke: theme.colour(ink), width: 1.4, points: { show: false }, spanGaps: true }))],
      hooks: { setCursor: [() => this.tell()] },
    };
  }

  /** All steps; each point is the mean of the last `num` of them that measured it. */
  show(model, num) {
    const names = model.sections.metric_names ?? [], zoom = this.zoom();
    const steps = model.steps.map(([step]) => step);
    this.data = [steps, ...this.series.map(([metric]) => means(model.steps.map(([step, values]) => (step === 1 && WITH_START.has(metric) ? null : values[names.indexOf(metric)] ?? null)), num))];
    this.plot.batch(() => {
      this.plot.setData(this.data, !zoom);
      if (zoom) this.plot.setScale("x", zoom);
    });
    this.tell();
    const words = this.series.map(([, name], at) => `${name} ${this.ends(this.data[at + 1])}`);
    this.box.setAttribute("aria-label", `${this.title}: ${words.join("; ")}`);
  }

  /** The first and the last known value, for whoever does not see the curve. */
  ends(values) {
    const there = values.map((value, at) => (known(value) ? at : -1)).filter((at) => at >= 0);
    if (!there.length) return "not measured";
    return [there[0], there.at(-1)].map((at) => `${this.write(values[at])} at step ${this.data[0][at]}`).join(", ");
  }

  /** What somebody has zoomed in to, which the next step leaves alone; null = all is shown. */
  zoom() {
    const { min, max } = this.plot.scales.x, steps = this.data?.[0] ?? [];
    return steps.length > 1 && (min > steps[0] || max < steps.at(-1)) ? { min, max } : null;
  }

  /** The values under the cursor, or the last ones. */
  tell() {
    if (!this.data?.[0].length) return;
    const index = this.plot.cursor.idx ?? this.data[0].length - 1;
    say(this.at, this.plot.cursor.idx == null ? "" : `step ${this.data[0][index]}`);
    this.values.forEach((value, at) => say(value, this.write(this.data[at + 1][index])));
  }

  resize() {
    const width = this.box.clientWidth;
    if (width > 0) this.plot.setSize({ width, height: HEIGHT });
  }

  remove() {
    this.plot.destroy();
    this.figure.remove();
  }
}

/** Of each value the mean of the last `num` up to it, those that are known; where it is not known itself there is none. */
function means(values, num) {
  if (num === 1) return values;
  return values.map((value, at) => {
    if (!known(value)) return null;
    const some = values.slice(Math.max(0, at + 1 - num), at + 1).filter(known);
    return some.reduce((sum, each) => sum + each, 0) / some.length;
  });
}

/** From a little below to a little above; from zero where that is near. A constant is a line in the middle. */
function range(least, most) {
  if (least === null || most === null) return [0, 1];
  if (least === most) return least === 0 ? [0, 1] : [Math.min(0, 2 * least), Math.max(0, 2 * least)];
  const space = 0.06 * (most - least);
  return [least >= 0 && least < 0.35 * most ? 0 : least - space, most + space];
}
