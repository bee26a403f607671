// What each train step measured, as small curves with one cursor.

import uPlot from "./vendor/uPlot.esm.js";
import { by, el, say } from "./dom.js";
import { NONE, integer, number, percent } from "./format.js";
import * as theme from "./theme.js";

const HEIGHT = 132;
const CURVES_AT_ONCE = 3; // made in one go
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]); // steps between ticks of steps
// Of each: title, [metric, name, colour] …, how a value is written.
const CURVES = [
  ["Reward", [["reward/mean", "mean", "ink"]], number],
  ["Response length, tokens", [["response_length/mean", "mean", "ink"]], number],
  ["Staleness, steps", [["off_policy/s_train/mean", "mean", "ink"], ["off_policy/s_train/max", "most", "second"]], number],
  ["Tokens/s", [["perf/generation_tokens_per_s", "generated", "ink"], ["perf/training_tokens_per_s", "trained", "second"]], integer],
  ["Entropy, nats/token", [["actor/entropy", "mean", "ink"]], number],
  ["Gradient norm", [["actor/grad_norm", "before clipping", "ink"]], number],
  ["KL, nats", [["actor/ppo_kl", "update", "ink"], ["mismatch_kl/mean", "engine–trainer", "second"]], number],
  ["Idle", [["perf/trainer_idle_ratio", "trainer", "ink"], ["perf/rollout_idle_ratio", "rollouts", "second"]], percent],
  ["Clipped tokens", [["actor/pg_clipfrac", "share", "ink"]], percent],
  ["Groups without a signal", [["advantage/zero_fraction", "share", "ink"]], percent],
  ["Truncated answers", [["is_truncated/mean", "share", "ink"]], percent],
  ["Step, s", [["timing/wall_s", "all", "ink"], ["perf/publication_stall_s", "publication", "second"]], number],
];

export class Curves {
  constructor(model) {
    this.model = model;
    this.empty = el("p", { class: "empty" }, "No train step has finished yet.");
    by("curves").append(this.empty);
    this.curves = [];
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
    this.build();
    for (const curve of this.curves) curve.show(this.model);
    return this.curves.length < CURVES.length; // the rest with the next frame
  }

  /** Some more of them, as long as not all are there. */
  build() {
    const missing = CURVES.slice(this.curves.length, this.curves.length + CURVES_AT_ONCE);
    const made = missing.map(([title, series, write]) => new Curve(title, series, write, this.sync.key));
    by("curves").append(...made.map((curve) => curve.figure));
    this.curves.push(...made);
    for (const curve of made) curve.resize();
  }

  rebuild() {
    for (const curve of this.curves) curve.remove();
    this.curves = [];
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

  show(model) {
    const names = model.sections.metric_names ?? [];
    const steps = model.steps.map(([step]) => step);
    this.data = [steps, ...this.series.map(([metric]) => model.steps.map(([, values]) => values[names.indexOf(metric)] ?? null))];
    this.plot.setData(this.data);
    this.tell();
    const first = steps[0], last = steps.at(-1);
    const words = this.series.map(([, name], at) => `${name} ${this.write(this.data[at + 1].find((value) => value !== null))} at step ${first}, ${this.write(this.data[at + 1].at(-1))} at step ${last}`);
    this.box.setAttribute("aria-label", `${this.title}: ${words.join("; ")}`);
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

/** From a little below to a little above; from zero where that is near. A constant is a line in the middle. */
function range(least, most) {
  if (least === null || most === null) return [0, 1];
  if (least === most) return least === 0 ? [0, 1] : [Math.min(0, 2 * least), Math.max(0, 2 * least)];
  const space = 0.06 * (most - least);
  return [least >= 0 && least < 0.35 * most ? 0 : least - space, most + space];
}
