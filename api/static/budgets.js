// Values of N and of budgets in tokens: their order, their names, and what they are multiples of.

import { grouped, short, significant } from "./page.js";

/** A count, or "unknown": nobody knows D_s of a model from elsewhere. */
export const orUnknown = (count, write = grouped) => (count === null ? "unknown" : write(count));

/** Orders rows by N, D_s, D_l; an unknown D_s comes first. */
export function bySizes(a, b) {
  const place = ["n_params", "short_tokens", "long_tokens"].find((axis) => a[axis] !== b[axis]);
  return place === undefined ? 0 : a[place] < b[place] ? -1 : 1;
}

/** The values of N, ascending, named by their scales. */
export function sizes(points) {
  const scales = new Map();
  for (const point of points) scales.set(point.n, (scales.get(point.n) ?? new Set()).add(point.scale));
  const values = [...scales]
    .sort(([a], [b]) => Number(a) - Number(b))
    .map(([n, names]) => ({ key: String(n), label: `${[...names].join(", ")} · ${short(n)}` }));
  return { values, of: (point) => String(point.n) };
}

/** The values of D_s, ascending; as multiples of N where those are fewer, as in grids that give budgets like 90N. */
export function shortBudgets(points) {
  const known = points.filter((point) => point.short !== null);
  const unknown = known.length < points.length ? [{ key: "unknown", label: "unknown" }] : [];
  const absolute = clusters(
    known.map((point) => Number(point.short)),
    1,
  );
  const multiples = clusters(
    known.map((point) => Number(point.short) / Number(point.n)),
    1.03,
  );
  const either = (key) => (point) => (point.short === null ? "unknown" : key(point));
  if (multiples.length >= absolute.length) {
    return {
      values: [...absolute.map((item) => ({ key: String(item.low), label: short(item.low) })), ...unknown],
      of: either((point) => String(Number(point.short))),
    };
  }
  const values = multiples.map((item, index) => ({
    ...item,
    key: `${index} of N`,
    label: `${significant((item.low + item.high) / 2, 3)}N`,
  }));
  const of = (point) => values.findLast((item) => item.low <= Number(point.short) / Number(point.n)).key;
  return { values: [...values, ...unknown], of: either(of) };
}

/** Groups of sorted numbers, a new one wherever the next is more than `ratio` times the one before. */
function clusters(numbers, ratio) {
  const found = [];
  for (const number of [...new Set(numbers)].sort((a, b) => a - b)) {
    if (found.length > 0 && number <= found.at(-1).high * ratio) found.at(-1).high = number;
    else found.push({ low: number, high: number });
  }
  return found;
}

/** At most `count` items, the ends among them. */
export function spread(items, count) {
  if (items.length <= count) return items;
  return Array.from({ length: count }, (_, index) => items[Math.round((index * (items.length - 1)) / (count - 1))]);
}
