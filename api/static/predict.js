// The prediction form: what the shown fit says at one point.

import { byId, grouped, h, setText, short, significant } from "./page.js";
import { ask } from "./service.js";

const AXES = [
  ["n_params", "N"],
  ["short_tokens", "D_s"],
  ["long_tokens", "D_l"],
];
const SUFFIX = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 };

/** A form that asks the fit it was last given, at the confidence level that `level()` says. */
export function predictView(level) {
  const form = byId("predict");
  let fit = null;
  let typed = false;
  form.addEventListener("input", () => {
    typed = true;
    readAll();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer();
  });

  function readAll() {
    const at = {};
    setText(byId("predict-error"), "");
    for (const [name] of AXES) {
      const size = readSize(form.elements[name].value, name === "n_params" ? null : at.n_params);
      at[name] = size.value;
      tell(
        name,
        size.error ?? (size.resolved ? `= ${size.resolved}` : ""),
        size.error !== undefined && form.elements[name].value.trim() !== "",
      );
    }
    return at;
  }

  async function answer() {
    const at = readAll();
    const empty = AXES.find(([name]) => at[name] === undefined);
    if (empty !== undefined) {
      const [name] = empty;
      if (form.elements[name].value.trim() === "") tell(name, "needs a number", true);
      form.elements[name].focus();
      return;
    }
    try {
      show(await ask("/v1/predictions", { fit: fit.id, level: level(), at }), at);
    } catch (error) {
      refuse(error);
    }
  }

  function refuse(error) {
    byId("answer").replaceChildren();
    let placed = false;
    for (const { pointer, message } of error.problem?.errors ?? []) {
      const axis = AXES.find(([name]) => pointer === `/at/${name}`);
      if (axis === undefined) continue;
      tell(axis[0], message, true);
      if (!placed) form.elements[axis[0]].focus();
      placed = true;
    }
    if (!placed) setText(byId("predict-error"), error.message);
  }

  function tell(name, text, wrong) {
    const note = byId(`at-${name}-note`);
    setText(note, text);
    note.classList.toggle("error", wrong);
    form.elements[name].setAttribute("aria-invalid", String(wrong));
  }

  function show(said, at) {
    const [point] = said.predictions;
    const share = `${Math.round(said.level * 100)} %`;
    const interval = (low, high, write) => (low === null ? "no interval" : `${write(low)} … ${write(high)}`);
    const ppl = (log) => significant(Math.exp(log), 4);
    const log = (value) => value.toFixed(4);
    const status = said.status === null ? "" : said.status.toLowerCase().replaceAll("_", " ");
    byId("answer").replaceChildren(
      h(
        "div",
        { class: "results" },
        h(
          "p",
          { class: "result" },
          h("span", { class: "small" }, "LongPPL"),
          h("output", { id: "answer-ppl" }, significant(point.longppl, 4)),
          h("span", { class: "small" }, `${share}: ${interval(point.low, point.high, ppl)}`),
        ),
        h(
          "p",
          { class: "result" },
          h("span", { class: "small" }, "log LongPPL (nats)"),
          h("output", { id: "answer-log", "data-value": String(point.log_longppl) }, log(point.log_longppl)),
          h("span", { class: "small" }, `${share}: ${interval(point.low, point.high, log)}`),
        ),
      ),
      h(
        "p",
        {},
        point.prediction_low === null
          ? "How far one new measurement would lie from it is not known."
          : `One new measurement would lie in ${interval(point.prediction_low, point.prediction_high, ppl)} (LongPPL, ${share}).`,
      ),
      h(
        "table",
        { class: "axes" },
        h("caption", { class: "hidden" }, "Extrapolation by axis"),
        h("tbody", {}, ...AXES.map(([name]) => axisRow(name, at[name], point.extrapolation[name]))),
      ),
      h(
        "p",
        {},
        point.determined
          ? `The fit ${fit.holdout ? `that held ${fit.holdout.selection} out ` : ""}determines this value (fit: ${status}).`
          : `The observations do not determine this value (fit: ${status}).`,
      ),
      h("ul", { class: "warnings" }, ...[...point.warnings, ...said.warnings].map((text) => h("li", {}, text))),
    );
  }

  function axisRow(name, size, ratio) {
    const { low, high } = fit.ranges?.[name] ?? { low: null, high: null };
    const range = low === null ? "the fitted range" : `the fitted range, ${short(low)} to ${short(high)}`;
    const text =
      ratio > 1 ? `${significant(ratio, 3)}× ${size > high ? "above" : "below"} ${range}` : `inside ${range}`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, axisName(name)),
      h("td", { class: "number" }, Number.isInteger(size) ? grouped(size) : String(size)),
      h("td", { class: ratio > 1 ? "beyond" : null }, text),
    );
  }

  return {
    /** Predicts with this fit from now on; null where there is none. */
    use: (details) => {
      fit = details?.state === "SUCCEEDED" ? details : null;
      form.hidden = fit === null;
      byId("answer").replaceChildren(
        h(
          "p",
          { class: "empty" },
          fit === null
            ? "Predictions need a fit, and there is none yet."
            : "The answer appears here, with its interval and how far it extrapolates.",
        ),
      );
      if (fit === null || typed || fit.ranges === null) return;
      form.elements.n_params.value = grouped(fit.ranges.n_params.high).replaceAll(",", "_");
      form.elements.short_tokens.value = grouped(fit.ranges.short_tokens.high).replaceAll(",", "_");
      form.elements.long_tokens.value = grouped(2 * fit.ranges.long_tokens.high).replaceAll(",", "_");
    },
  };
}

function axisName(name) {
  return name === "n_params" ? "N" : h("span", {}, "D", h("sub", {}, name === "short_tokens" ? "s" : "l"));
}

/**
 * A size as people write it: 1e9, 1_000_000, 1,000,000, 3.5M, 2B, and 90N where N is known.
 *
 * Gives `value`, with `resolved` where it is not what was typed, or an `error`.
 */
export function readSize(text, nParams) {
  const plain = text.trim().replace(/(?<=\d)[_\s](?=\d)/g, "");
  const digits = /^-?\d{1,3}(,\d{3})+(\.\d+)?/.test(plain) ? plain.replaceAll(",", "") : plain;
  const parts = /^(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([kmbt]?)(n?)$/i.exec(digits);
  if (parts === null)
    return { error: `${JSON.stringify(text.trim())} is not a number: write 1e9, 1_000_000, 3.5M or 2B` };
  const [, number, unit, multiple] = parts;
  let value = Number(number) * SUFFIX[unit.toLowerCase()];
  if (multiple) {
    if (nParams === null) return { error: "N itself cannot be a multiple of N" };
    if (nParams === undefined) return { error: "needs N first" };
    value = Math.round(value * nParams);
  }
  if (!Number.isFinite(value)) return { error: "is too large" };
  return { value, resolved: unit || multiple || /e/i.test(number) ? grouped(value) : undefined };
}
