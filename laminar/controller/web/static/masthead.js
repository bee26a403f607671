// Name, progress, and where the bottleneck is.

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
    if (changed.has("progress")) this.progress(progress);
    if (changed.has("verdict")) {
      say(by("verdict-headline"), verdict.headline);
      say(by("verdict-reason"), verdict.reason);
      by("verdict-headline").parentElement.dataset.limit = verdict.limit;
    }
  }

  progress(progress) {
    say(document.querySelector('[data-figure="step"]'), `step ${integer(progress.step)}`);
    say(by("of-steps"), `of ${integer(progress.steps)}`);
    say(by("eta"), progress.finished || !progress.eta_s ? "" : `· about ${duration(progress.eta_s)} to go`);
    by("steps").max = progress.steps;
    by("steps").value = progress.step;
    const notices = progress.held.map((held) => `Decision ${held.id} of the pass ${held.pass_name} waits for an operator.`);
    if (!progress.finished) notices.push(`New groups: ${progress.new_groups}.`);
    say(by("notices"), notices.join(" "));
  }
}
