// The relay chain: who holds which version, and what is on its way.

import { by, el } from "./dom.js";
import { bytes, percent } from "./format.js";

export class Relays {
  constructor(model) {
    this.model = model;
  }

  update(changed) {
    if (!changed.has("relays")) return;
    const relays = this.model.sections.relays;
    if (!relays.order.length) return by("relays").replaceChildren(el("p", { class: "empty" }, "No relay has joined yet."));
    const behind = relays.order.filter((name) => !(relays.held[name] ?? []).includes(relays.newest)).length;
    const words = relays.newest
      ? `${relays.newest} is the newest; ${behind ? `${behind} of ${relays.order.length} relays do not hold it yet` : "every relay holds it"}.`
      : "No version is published yet.";
    by("relays").replaceChildren(
      el("p", { class: "plain" }, `${words} Chain of epoch ${relays.epoch}.`),
      el("ol", { class: relays.order.length > MANY ? "chain many" : "chain" }, ...relays.order.map((name) => node(name, relays))),
    );
  }
}

const MANY = 8; // from then on only what is special about a relay is told

function node(name, relays) {
  const held = relays.held[name] ?? [], link = relays.links[name];
  const coming = link?.receiving, isUsual = relays.order.length > MANY && held.includes(relays.newest);
  const parts = [el("b", {}, name), name === relays.master ? el("span", { class: "badge" }, "master") : null, isUsual ? null : el("span", { class: "held" }, held.length ? `holds ${held.slice(-3).join(", ")}` : "holds nothing yet")];
  if (coming) {
    const share = coming.of ? coming.bytes / coming.of : 0;
    parts.push(el("label", { class: "coming" }, `${coming.version} ${percent(share)} `, el("progress", { max: "1", value: String(share) })));
  }
  if (link?.sent_bytes && relays.order.length <= MANY) {
    parts.push(el("span", { class: "held" }, `${link.transport}, sent ${bytes(link.sent_bytes)}, on the wire ${percent(link.wire_bytes / link.sent_bytes)}`));
  }
  return el("li", {}, ...parts.filter(Boolean));
}
