// Elements and numbers. Text reaches the page as text nodes only, whatever a name holds.

export const byId = (id) => document.getElementById(id);

/** An element: `h("td", { class: "number" }, "1")`. Strings become text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Makes the children of `parent` those of `items`, reusing elements, so that focus and selection survive. */
export function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let element = old.get(name);
    if (element === undefined) {
      element = make(item);
      element.dataset.key = name;
    }
    update?.(element, item);
    if (parent.children[index] !== element) parent.insertBefore(element, parent.children[index] ?? null);
  });
  while (parent.children.length > items.length) parent.lastElementChild.remove();
}

/** Rebuilds the content of `element` only where `value` differs from what it was built from before. */
const built = new WeakMap();
export function rebuild(element, value, build) {
  const signature = JSON.stringify(value, (_, item) => (typeof item === "bigint" ? `${item}n` : item));
  if (built.get(element) === signature) return;
  built.set(element, signature);
  element.replaceChildren(...build());
}

const GROUPS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 });
const UNITS = [
  [1e12, "T"],
  [1e9, "B"],
  [1e6, "M"],
  [1e3, "k"],
];

/** An exact count with thousands separated: 9,007,199,254,740,993; "–" for one that nobody knows. */
export const grouped = (count) => (count === null || count === undefined ? "–" : GROUPS.format(count));

/** Three significant digits with a unit: 1.05M. */
export function short(count) {
  const value = Number(count);
  for (const [size, unit] of UNITS) {
    if (value >= 0.9995 * size && value < 1e15) return `${significant(value / size, 3)}${unit}`;
  }
  return value >= 1e15 ? value.toExponential(2).replace("e+", "e") : significant(value, 3);
}

/** As many significant digits, without an exponent where that stays readable; "–" for what does not exist. */
export function significant(value, digits) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = Number(value).toPrecision(digits);
  return size !== 0 && (size >= 1e6 || size < 1e-4) ? text.replace("e+", "e") : String(Number(text));
}

/** As many significant digits, zeros at the end included, so that numbers of a column align. */
export function precise(value, digits) {
  if (value === null || value === undefined) return "–";
  return value !== 0 && (Math.abs(value) >= 10 ** digits || Math.abs(value) < 1e-3)
    ? significant(value, digits)
    : value.toPrecision(digits);
}

export const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

/** A share in percent, rounded down: 100 % is said when all is done. */
export const percent = (share) => `${(Math.floor(share * 1000) / 10).toFixed(1)} %`;

export function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (hours >= 48) return `${grouped(Math.round(hours / 24))} days`;
  if (hours) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s` : `${Math.floor(seconds)} s`;
}

const WHEN = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

/** A time on this machine's clock; the title says it in UTC. */
export function time(text) {
  return h(
    "time",
    { datetime: text, title: text.replace("T", " ").replace(/\.\d+/, "").replace("Z", " UTC") },
    WHEN.format(new Date(text)),
  );
}
export const timeText = (text) => WHEN.format(new Date(text));
export const clock = () => new Date().toLocaleTimeString("en-GB");

const SYMBOLS = {
  A: ["A"],
  alpha: ["α"],
  B_s: ["B", "s"],
  beta_s: ["β", "s"],
  B_l: ["B", "l"],
  beta_l: ["β", "l"],
  C: ["C"],
};

/** A parameter's name as it is printed: beta_s is β with a small s. */
export function symbol(name) {
  const [letter, index] = SYMBOLS[name] ?? [name];
  return h("i", {}, letter, index ? h("sub", {}, index) : null);
}
