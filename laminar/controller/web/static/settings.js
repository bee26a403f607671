// What the run was started with, as far as it is not as everywhere.

import { by, el, table } from "./dom.js";

export class Settings {
  constructor(model) {
    this.model = model;
  }

  update(changed) {
    if (!changed.has("run") && !changed.has("settings")) return;
    const { run, settings } = this.model.sections;
    const where = run.path ? `${run.path} on ${run.host}, Laminar ${run.laminar}` : "";
    const rows = (settings ?? []).map((row) => row.map((text) => el("code", {}, text)));
    by("settings").replaceChildren(
      el("p", { class: "plain" }, where),
      el("details", {}, el("summary", {}, `${rows.length} settings that are not at their defaults`), el("div", { class: "scroll-x" }, table("Settings", ["key", "value", "default"], rows))),
    );
  }
}
