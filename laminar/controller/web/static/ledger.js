// The closed ledger: where every drawn trajectory and every received token is.

import { by, el, table } from "./dom.js";
import { integer, percent } from "./format.js";

const PLACES = ["in_flight", "buffered", "leased", "committed"];

export class Ledger {
  constructor(model) {
    this.model = model;
  }

  update(changed) {
    if (!changed.has("ledger")) return;
    const { trajectories, tokens } = this.model.sections.ledger;
    const reasons = [...new Set([...Object.keys(trajectories.dropped), ...Object.keys(tokens.dropped)])];
    const headings = ["", "total", ...PLACES.map((place) => place.replace("_", " ")), ...reasons.map((reason) => `dropped: ${reason}`), "adds up"];
    const rows = [["trajectories drawn", trajectories], ["tokens received", tokens]].map(([name, row]) => [
      name,
      cell("total", integer(row.total)),
      ...PLACES.map((place) => cell(place, integer(row[place]), row.total ? row[place] / row.total : null)),
      ...reasons.map((reason) => cell("dropped", integer(row.dropped[reason] ?? 0), row.total ? (row.dropped[reason] ?? 0) / row.total : null)),
      row.closed ? "yes" : el("b", { class: "error" }, "NO"),
    ]);
    const node = table("Ledger", headings, rows, headings.map((_, at) => at).slice(1, -1));
    node.className = "ledger";
    by("ledger").replaceChildren(el("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": "Ledger" }, node));
  }
}

function cell(place, text, share = null) {
  return el("span", { "data-place": place }, text, share === null ? null : el("span", { class: "share" }, percent(share)));
}
