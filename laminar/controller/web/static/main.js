// The dashboard: in with a token, then a frame twice a second, drawn when the browser paints.

import { by, say } from "./dom.js";
import * as theme from "./theme.js";
import { Model } from "./model.js";
import { Stream, session } from "./stream.js";
import * as format from "./format.js";
import { Masthead } from "./masthead.js";
import { Figures } from "./figures.js";
import { Lanes } from "./lanes.js";
import { Curves } from "./curves.js";
import { Histograms } from "./histograms.js";
import { Fleet } from "./fleet.js";
import { Samples } from "./samples.js";
import { Relays } from "./relays.js";
import { Ledger } from "./ledger.js";
import { Journal } from "./journal.js";
import { Detail } from "./detail.js";

const model = new Model();
let views = [];
let changed = new Set();
let isDue = false;
let isOpen = false;

const stream = new Stream({
  opened() {
    model.clear();
    changed = new Set();
    isOpen = true;
    show("page");
    if (!views.length) views = [Masthead, Figures, Lanes, Curves, Histograms, Fleet, Samples, Relays, Ledger, Journal, Detail].map((view) => new view(model));
    for (const view of views) view.clear?.();
    document.body.classList.remove("lost");
  },
  heard(frame) {
    for (const name of model.apply(frame)) changed.add(name);
    if (!isDue) requestAnimationFrame(draw);
    isDue = true;
  },
  lost(pause) {
    isOpen = false;
    document.body.classList.add("lost");
    const since = model.at ? `, last heard ${format.clock(model.at)}` : "";
    const over = model.sections.progress?.finished;
    say(by("connection"), over ? `the controller has ended${since}` : `connection lost${since}; trying again in ${format.duration(pause / 1000)}`);
    if (!model.at) show("page");
  },
  refused() {
    show("login");
    by("token").focus();
  },
});

/** Bring everything up to date that has changed since the last time. */
function draw() {
  isDue = false;
  if (!isOpen) return;
  const began = performance.now();
  const now = changed;
  changed = new Set();
  say(by("connection"), "live");
  for (const view of views) view.update(now);
  performance.measure("laminar:update", { start: began, detail: { at: model.at } }); // for scripts/bench_dashboard.py
}

function show(part) {
  by("login").hidden = part !== "login";
  by("page").hidden = part !== "page";
}

/** Whether the token was taken; what was wrong is said on the form. */
async function login(token) {
  try {
    const answer = await fetch("/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token }) });
    say(by("login-error"), answer.ok ? "" : (await answer.json()).error);
    return answer.ok;
  } catch {
    say(by("login-error"), "the controller does not answer");
    return false;
  }
}

by("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!(await login(by("token").value))) return;
  by("token").value = "";
  stream.connect();
});

by("logout").addEventListener("click", async () => {
  await fetch("/logout", { method: "POST" });
  location.assign("/");
});

theme.start(by("theme"));
setInterval(() => performance.clearMeasures(), 600000); // they would pile up

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  history.replaceState(null, "", "/");
  await login(given);
}
if ((await session()) === false) stream.refused();
else stream.connect();
