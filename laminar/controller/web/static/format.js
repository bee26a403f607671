// Numbers, times and text for people.

const integers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const NONE = "–";
export const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const integer = (value) => (known(value) ? integers.format(value) : NONE);

/** Whole, below one with one digit. */
export function percent(value) {
  if (!known(value)) return NONE;
  const share = 100 * value;
  return `${share !== 0 && Math.abs(share) < 1 ? Number(share.toPrecision(1)) : Math.round(share)} %`;
}

/** Three significant digits, without an exponent where one can do without. */
export function number(value) {
  if (!known(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return integers.format(value);
  return String(Number(value.toPrecision(3)));
}

/** So many digits after the point. */
export const fixed = (value, digits) => (known(value) ? value.toFixed(digits) : NONE);

/** 12,345 as 12.3 k. */
export function short(value) {
  if (!known(value)) return NONE;
  for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= factor) return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

/** A length of time: 0.42 s, 12 s, 3 min 5 s, 2 h 10 min. */
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const two = (value) => String(value).padStart(2, "0");

/** Time of day of a moment in seconds since the epoch. */
export function clock(at) {
  const date = new Date(1000 * at);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export const bytes = (value) => (known(value) ? `${short(value)}B` : NONE);

/** 1 group, 2 groups. */
export const plural = (num, one, many = `${one}s`) => `${integer(num)} ${num === 1 ? one : many}`;

// What would not be seen, or would turn the order of what follows: control characters but line feed and tab, marks of direction.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Text as it is, with what one could not see named. */
export const visible = (text) => text.replace(UNSEEN, (each) => `‹U+${each.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);
