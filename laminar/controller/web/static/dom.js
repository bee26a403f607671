// Elements are made here and nowhere from text: what a model wrote can never become markup.

/** An element. `props`: attributes; `class` and `data-…` as written, functions as listeners; null and false are left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set the text of an element, if it is another one. */
export function say(node, text) {
  const known = node.firstChild;
  if (known === null || known.nodeType !== Node.TEXT_NODE || node.childNodes.length > 1) node.textContent = text;
  else if (known.data !== text) known.data = text;
}

export const by = (id) => document.getElementById(id);

/** A group of buttons of which one is pressed. `choices`: [value, text] … */
export function choice(label, choices, chosen, choose) {
  const group = el("div", { class: "choice", role: "group", "aria-label": label });
  for (const [value, text] of choices) {
    const button = el("button", { type: "button", "aria-pressed": String(value === chosen) }, text);
    button.addEventListener("click", () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      choose(value);
    });
    group.append(button);
  }
  return group;
}

/** A table with these headings; `rows` are arrays of texts or nodes. `numbers`: columns set flush right. */
export function table(caption, headings, rows, numbers = []) {
  const right = (at) => (numbers.includes(at) ? "number" : null);
  return el(
    "table",
    {},
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, ...headings.map((text, at) => el("th", { scope: "col", class: right(at) }, text)))),
    el(
      "tbody",
      {},
      ...rows.map((row) => el("tr", {}, ...row.map((cell, at) => el(at ? "td" : "th", { scope: at ? null : "row", class: right(at) }, cell)))),
    ),
  );
}
