// The figures that one looks at first. Each is the controller's own: docs/metrics.md.

import { by, el, say } from "./dom.js";
import { NONE, fixed, integer, known, number, percent } from "./format.js";

const FIGURES = [
  ["reward", "Reward", "mean of the last batch", (s) => fixed(s.metrics?.["reward/mean"], 3)],
  ["accuracy", "Accuracy", "greedy, held out: before, after", accuracy],
  ["staleness", "Staleness", "mean and most, trainer steps", staleness],
  ["generation", "Generation", "tokens/s, last step", (s) => integer(s.metrics?.["perf/generation_tokens_per_s"])],
  ["training", "Training", "tokens/s, last step", (s) => integer(s.metrics?.["perf/training_tokens_per_s"])],
  ["trainer-idle", "Trainer idle", "of the last step", (s) => percent(s.metrics?.["perf/trainer_idle_ratio"])],
  ["rollout-idle", "Rollouts idle", "of the last step", (s) => percent(s.metrics?.["perf/rollout_idle_ratio"])],
  ["buffer", "Buffer", "complete groups, and a batch", (s) => `${integer(s.buffer?.groups)} / ${integer(s.buffer?.batch_groups)}`],
  ["received", "Arriving", "tokens/s, now", (s) => integer(s.progress?.tokens_per_s)],
  ["lag", "Loop lag", "of the controller, most", lag],
];

/** Of the evaluations, if the run makes any. */
function accuracy({ progress }) {
  const done = Object.fromEntries((progress?.evaluations ?? []).map(([name, , value]) => [name, value]));
  return known(done.before) ? `${fixed(done.before, 3)} → ${known(done.after) ? fixed(done.after, 3) : progress.finished ? NONE : "…"}` : "";
}

function staleness({ metrics }) {
  if (!known(metrics?.["off_policy/s_train/mean"])) return NONE;
  return `${fixed(metrics["off_policy/s_train/mean"], 2)} / ${integer(metrics["off_policy/s_train/max"])}`;
}

function lag({ metrics }) {
  const lag_s = metrics?.["event_loop_lag/max"];
  return known(lag_s) ? `${number(1000 * lag_s)} ms` : NONE;
}

export class Figures {
  constructor(model) {
    this.model = model;
    this.values = FIGURES.map(([name, title, unit]) => {
      const value = el("dd", { "data-figure": name }, NONE);
      by("figures").append(el("div", {}, el("dt", {}, title), value, el("dd", { class: "unit" }, unit)));
      return value;
    });
  }

  update(changed) {
    if (!["metrics", "buffer", "progress"].some((name) => changed.has(name))) return;
    FIGURES.forEach(([, , , read], at) => {
      const value = read(this.model.sections);
      say(this.values[at], value);
      this.values[at].parentElement.hidden = value === "";
    });
  }
}
