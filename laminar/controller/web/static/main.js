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
import { Settings } from "./settings.js";
import { Detail } from "./detail.js";

const model = new Model();
const BUDGET_MS = 25; // of one draw; what is left comes with the next frame of the screen
let views = [];
let due = new Map(); // view -> names of what has changed since it was drawn
let isDue = false;
let isOpen = false;

const stream = new Stream({
  opened() {
    model.clear();
    due = new Map();
    isOpen = true;
    show("page");
    if (!views.length) views = [Masthead, Figures, Lanes, Curves, Histograms, Fleet, Samples, Relays, Ledger, Journal, Settings, Detail].map((view) => new view(model));
    for (const view of views) view.clear?.();
    document.body.classList.remove("lost", "over");
  },
  heard(frame) {
    const changed = model.apply(frame);
    for (const view of views) due.set(view, new Set([...(due.get(view) ?? []), ...changed]));
    request();
  },
  lost(pause, why) {
    isOpen = false;
    const over = model.sections.progress?.finished, heard = model.at ? format.clock(model.at) : "";
    document.body.classList.add(over ? "over" : "lost");
    const lost = `${why || "connection lost"}${heard && `, last heard ${heard}`}; trying again in ${format.duration(pause / 1000)}`;
    say(by("connection"), over ? `the controller has ended; this is how it was at ${heard}` : lost);
    if (!model.at) show("page");
  },
  refused() {
    isOpen = false;
    stream.disconnect();
    show("login");
    by("token").focus();
  },
});

function request() {
  if (!isDue) requestAnimationFrame(draw);
  isDue = true;
}

/** Bring views up to date, for as long as one may hold up the page; a view says whether it has more to do. */
function draw() {
  isDue = false;
  if (!isOpen) return;
  const began = performance.now();
  say(by("connection"), "live");
  for (const [view, changed] of due) {
    due.delete(view); // at the end again if there is more: the others take their turns
    if (view.update(changed)) due.set(view, changed);
    if (performance.now() - began > BUDGET_MS) break;
  }
  if (due.size) request();
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
  try {
    await fetch("/logout", { method: "POST" });
  } catch {
    return; // nobody is there who could take the cookie back
  }
  location.assign("/");
});

addEventListener("laminar:refused", () => stream.refused());

theme.start(by("theme"));
setInterval(() => performance.clearMeasures(), 600000); // they would pile up

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  history.replaceState(null, "", "/");
  await login(given);
}
if ((await session()) === false) stream.refused();
else stream.connect();
