// Light, dark, or what the system wants; and the colours that canvases need to know.

const KEY = "laminar-theme";
const ORDER = ["system", "light", "dark"];
const listeners = [];
const system = matchMedia("(prefers-color-scheme: dark)");

let chosen = ORDER.includes(stored()) ? stored() : "system";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is switched off
  }
}

export function start(button) {
  apply(button);
  button.addEventListener("click", () => {
    chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // then it is forgotten with the page
    }
    apply(button);
  });
  system.addEventListener("change", () => apply(button));
}

export const onChange = (listener) => listeners.push(listener);

function apply(button) {
  const dark = chosen === "dark" || (chosen === "system" && system.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  button.textContent = `Theme: ${chosen}`;
  cache.clear();
  for (const listener of listeners) listener();
}

const cache = new Map();

/** A colour of base.css by name, for a canvas. */
export function colour(name) {
  if (!cache.has(name)) cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}

const NUM_VERSION_COLOURS = 6;

/** Of a weight version: neighbours in order of publication differ. */
export function versionColour(version) {
  const [, step, branch] = /^v(\d+)(?:\.b(\d+))?$/.exec(version) ?? [null, 0, 0];
  return colour(`version-${(Number(step) + 3 * Number(branch ?? 0)) % NUM_VERSION_COLOURS}`);
}
