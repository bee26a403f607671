// Name, progress, where the bottleneck is, and what an operator has a hand in.

import { by, say } from "./dom.js";
import { duration, integer } from "./format.js";

export class Masthead {
  constructor(model) {
    this.model = model;
  }

  update(changed) {
    const { run, progress, verdict } = this.model.sections;
    if (changed.has("run")) {
      say(by("run-name"), run.name);
      document.title = `${run.name} · Laminar`;
    }
    if (progress) this.progress(progress);
    if (progress) say(by("notices"), this.notices().join(" "));
    if (changed.has("verdict")) {
      say(by("verdict-headline"), verdict.headline);
      say(by("verdict-reason"), verdict.reason);
      by("verdict-headline").parentElement.dataset.limit = verdict.limit;
    }
  }

  progress(progress) {
    say(document.querySelector('[data-figure="step"]'), `step ${integer(progress.step)}`);
    say(by("of-steps"), `of ${integer(progress.steps)}`);
    const { began } = this.model.sections;
    const words = began ? [`${duration(Math.max(0, Math.floor(this.model.at - began)))} so far`] : [];
    if (!progress.finished && progress.eta_s) words.push(`${duration(Math.ceil(progress.eta_s))} to go`);
    say(by("times"), words.map((each) => `· ${each}`).join(" "));
    by("steps").max = progress.steps;
    by("steps").value = progress.step;
  }

  notices() {
    const { progress, operator } = this.model.sections;
    if (progress.finished) return [];
    const settings = Object.entries(operator?.settings ?? {}).map(([name, value]) => `${name} = ${value}`);
    if (operator?.sampler) settings.push(`sampler = ${operator.sampler}`);
    return [
      `New groups: ${progress.new_groups}.`,
      ...(operator?.holds ?? []).map((held) => `${held[0].toUpperCase()}${held.slice(1)}.`),
      ...(settings.length ? [`Changed by an operator: ${settings.join(", ")}.`] : []),
      ...(operator?.stop_after_step ? [`The run stops after step ${integer(operator.stop_after_step)}.`] : []),
    ];
  }
}
