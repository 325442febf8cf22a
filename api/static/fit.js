// One fit in numbers and in words.

import { byId, grouped, h, precise, rebuild, setText, significant, symbol, time } from "./page.js";

const GOOD = new Set(["CONVERGED"]);
const BAD = new Set(["NOT_CONVERGED", "FAILED"]);

/** Shows a fit's details, or hides the panel where there is none. */
export function drawFit(fit) {
  byId("fit-panel").hidden = fit === null;
  if (fit === null) return;
  const status = fit.status ?? fit.state;
  setText(byId("fit-status"), status.toLowerCase().replaceAll("_", " "));
  byId("fit-status").dataset.state = GOOD.has(status) ? "SUCCEEDED" : BAD.has(status) ? "FAILED" : "CANCELLED";
  rebuild(byId("fit-body"), [fit.id, fit.state], () =>
    [
      facts(fit),
      fit.reason ? h("p", { class: "note" }, fit.reason) : null,
      fit.holdout ? holdout(fit.holdout) : null,
      h(
        "div",
        { class: "columns" },
        fit.parameters.length > 0 ? h("div", {}, formula(), parameters(fit)) : null,
        h(
          "div",
          {},
          ...list("What it can and cannot know", fit.explanation, "explanation"),
          ...list("Warnings", fit.warnings, "warnings"),
        ),
      ),
    ].filter(Boolean),
  );
}

function facts(fit) {
  const parts = [h("span", {}, "Fitted ", time(fit.ended_at ?? fit.created_at))];
  if (fit.n_observations !== null)
    parts.push(
      h("span", {}, `${grouped(fit.n_observations)} observations from ${grouped(fit.n_clusters)} short checkpoints`),
    );
  if (fit.r2 !== null) parts.push(h("span", {}, `R² ${significant(fit.r2, 4)} on what it was fitted to`));
  if (fit.residual_std !== null) parts.push(h("span", {}, `residuals ${significant(fit.residual_std, 2)} nats`));
  return h("p", { class: "facts" }, ...parts);
}

function formula() {
  const power = (amplitude, size, index, exponent) => [
    symbol(amplitude),
    " ",
    h("i", {}, size, index ? h("sub", {}, index) : null),
    h("sup", {}, "−", symbol(exponent)),
  ];
  return h(
    "p",
    { class: "formula" },
    "log LongPPL = ",
    ...power("A", "N", null, "alpha"),
    " + ",
    ...power("B_s", "D", "s", "beta_s"),
    " + ",
    ...power("B_l", "D", "l", "beta_l"),
    " + ",
    symbol("C"),
  );
}

function parameters(fit) {
  const heads = [["Parameter"], ["Value", "number"], ["Low", "number"], ["High", "number"]];
  const noted = fit.parameters.some((item) => !item.identifiable || item.at_bound);
  if (noted) heads.push(["Note"]);
  const rows = fit.parameters.map((item) => {
    const note = !item.identifiable ? "not identifiable" : item.at_bound ? "at its bound" : "";
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, symbol(item.name)),
      ...[precise(item.value, 4), precise(item.low, 4), precise(item.high, 4)].map((text) =>
        h("td", { class: "number" }, text),
      ),
      noted ? h("td", {}, note) : null,
    );
  });
  const level = fit.level === null ? "No intervals" : `Low to high: ${Math.round(fit.level * 100)} % interval`;
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      { class: "parameters" },
      h("caption", {}, level),
      h("thead", {}, h("tr", {}, ...heads.map(([text, kind]) => h("th", { scope: "col", class: kind }, text)))),
      h("tbody", {}, ...rows),
    ),
  );
}

function holdout(item) {
  const cell = (name, text, unit) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, text), h("dd", { class: "small" }, unit));
  return h(
    "dl",
    { class: "tiles holdout" },
    cell("Held-out points", item.n_observations === null ? "–" : grouped(item.n_observations), item.selection),
    cell("R²", significant(item.r2, 3), "1 is perfect, 0 is guessing the mean"),
    cell(
      "MAPE LongPPL",
      item.mape_ppl === null ? "–" : `${significant(item.mape_ppl, 3)} %`,
      item.mape_log === null ? "" : `${significant(item.mape_log, 3)} % of log LongPPL`,
    ),
    cell(
      "Bias",
      item.bias === null ? "–" : `${item.bias > 0 ? "+" : ""}${significant(item.bias, 2)}`,
      "nats, predicted minus observed",
    ),
  );
}

function list(title, lines, kind) {
  return lines.length === 0
    ? []
    : [h("h3", {}, title), h("ul", { class: kind }, ...lines.map((line) => h("li", {}, line)))];
}
