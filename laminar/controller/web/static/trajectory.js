// The text of a trajectory, each token shaded by how likely the policy held it to be.

import { el } from "./dom.js";
import { fixed, integer, known, visible } from "./format.js";

// Probability from which on a token has this class; below the last: p5.
const CLASSES = [[0.9, "p0"], [0.5, "p1"], [0.2, "p2"], [0.05, "p3"], [0.01, "p4"]];
const KEY = [["p0", "≥ 90 %"], ["p1", "≥ 50 %"], ["p2", "≥ 20 %"], ["p3", "≥ 5 %"], ["p4", "≥ 1 %"], ["p5", "less"], ["environment", "not the model’s"]];

/** Nodes for a trajectory as `/v1/dashboard/trajectory` tells it; `show(first)` brings other tokens of it. */
export function text(t, show) {
  const cut = t.prompt_left_out ? el("p", { class: "aside" }, `its first ${integer(t.prompt_left_out)} tokens are left out`) : null;
  const prompt = t.prompt_text ? [el("h3", {}, "Prompt"), cut, el("pre", { class: "text" }, visible(t.prompt_text))] : [];
  if (!t.tokens) return [...prompt, el("h3", {}, "Response"), el("p", { class: "empty" }, t.why_no_tokens)].filter(Boolean);
  return [
    ...prompt,
    el("h3", {}, "Response"),
    el("p", { class: "shades" }, "probability of the token: ", ...KEY.map(([name, words]) => el("span", { class: name }, words))),
    el("pre", { class: "text tokens" }, ...t.tokens.map((each, at) => token(each, t.first + at))),
    pages(t, show),
    t.why_no_text ? el("p", { class: "aside" }, t.why_no_text) : null,
  ].filter(Boolean);
}

/** Where one is in a long text, and the way to the rest. */
function pages(t, show) {
  const end = t.first + t.tokens.length;
  if (end >= t.num_tokens && t.first === 0) return null;
  const last = Math.floor(Math.max(0, t.num_tokens - 1) / t.most) * t.most;
  const turn = (words, first, can) => el("button", { type: "button", disabled: !can, click: () => show(first) }, words);
  return el(
    "p",
    { class: "aside pages" },
    turn("first", 0, t.first > 0),
    turn("earlier", Math.max(0, t.first - t.most), t.first > 0),
    el("span", {}, t.tokens.length ? `tokens ${integer(t.first + 1)} to ${integer(end)} of ${integer(t.num_tokens)}` : `it has ${integer(t.num_tokens)} tokens`),
    turn("later", t.first + t.most, end < t.num_tokens),
    turn("last", last, end < t.num_tokens),
  );
}

function token([id, piece, logprob, source], at) {
  const environment = source !== 0;
  const likely = known(logprob) ? Math.exp(logprob) : null;
  const shade = environment || likely === null ? "environment" : (CLASSES.find(([from]) => likely >= from)?.[1] ?? "p5");
  const told = likely === null ? "log-prob not known" : `log-prob ${fixed(logprob, 3)}, ${(100 * likely).toPrecision(3)} %`;
  return el("span", { class: shade, title: `token ${at + 1}, id ${id}, ${environment ? "not the model's" : told}` }, visible(piece).replaceAll("\n", "↵\n"));
}
