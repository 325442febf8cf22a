// Observations of a series, the chosen fit, and the chart of both.

import { bySizes, orUnknown, shortBudgets, sizes, spread } from "./budgets.js";
import { ROLES, figure, stroke, swatch } from "./chart.js";
import { drawFit } from "./fit.js";
import { byId, fixed, grouped, h, keyed, precise, rebuild, setText, timeText } from "./page.js";
import { colour, loadPlotly, plot, redrawn, theme } from "./plot.js";
import { ask, askAll, isAnswer } from "./service.js";

const MOST_OBSERVATIONS = 20_000;
const MOST_SHOWN = 6; // values of N, and of D_s, that are drawn before a person chooses
const MOST_ROWS = 500;
const CURVE_POINTS = 36;
const BEYOND = 2; // how far curves run past the largest D_l
const LATEST = "latest";
const OPEN = new Set(["PENDING", "RUNNING"]);

/** `fitShown(fit)` is called with the details of each newly chosen fit, or null. */
export function lawView(initial, fitShown) {
  const state = {
    all: [],
    seriesId: initial.series,
    choice: initial.fit ?? LATEST,
    fits: [],
    fit: null,
    loaded: null,
    rows: [],
    answer: null,
  };
  const hidden = { n_params: new Set(), short_tokens: new Set() };
  let chipsTouched = false;
  let turn = 0; // of loading; an answer that comes after a newer question is dropped
  let drawing = 0;

  const controls = byId("controls");
  const level = () => Number(byId("level").value);
  byId("series").addEventListener("change", (event) => choose({ seriesId: event.target.value, choice: LATEST }));
  byId("fit").addEventListener("change", (event) => choose({ choice: event.target.value }));
  byId("level").addEventListener("change", () => attempt(draw));
  byId("band").addEventListener("change", () => attempt(draw));
  for (const name of ["panels", "axis"])
    controls.elements[name].forEach((radio) => radio.addEventListener("change", () => attempt(draw)));
  byId("rows").addEventListener("toggle", drawRows);
  redrawn(byId("chart"), () => attempt(draw));

  function choose(change) {
    if (change.seriesId && change.seriesId !== state.seriesId) {
      chipsTouched = false;
      Object.assign(state, { loaded: null, rows: [] });
    }
    Object.assign(state, change);
    attempt(load);
  }

  function attempt(action) {
    action().catch((error) => {
      if (!isAnswer(error)) console.error(error);
      say(error.message);
    });
  }

  function say(text) {
    byId("law-note").hidden = text === "";
    setText(byId("law-note"), text);
  }

  async function refresh() {
    state.all = (await ask("/v1/series")).items;
    byId("no-series").hidden = state.all.some((item) => item.observations > 0);
    byId("law-body").hidden = !byId("no-series").hidden;
    if (byId("law-body").hidden) return;
    if (!state.all.some((item) => item.id === state.seriesId)) {
      state.seriesId = (
        state.all.findLast((item) => item.latest_fit_id) ?? state.all.findLast((item) => item.observations > 0)
      ).id;
    }
    await load();
  }

  async function load() {
    const mine = ++turn;
    let series = state.all.find((item) => item.id === state.seriesId);
    if (series === undefined) {
      state.all = (await ask("/v1/series")).items; // a grid that was submitted a moment ago
      series = state.all.find((item) => item.id === state.seriesId);
      if (mine !== turn || series === undefined) return;
    }
    const fits = (await ask(`/v1/fits?series=${encodeURIComponent(series.id)}&limit=100`)).items;
    if (mine !== turn) return;
    state.fits = fits;
    drawChoices(series);
    const chosen = resolve(series);
    const loaded = `${series.id} ${series.observations} ${series.latest_fit_id}`;
    const [rows, fit] = await Promise.all([
      state.loaded === loaded
        ? state.rows
        : askAll(`/v1/observations?series=${encodeURIComponent(series.id)}&limit=1000`, MOST_OBSERVATIONS),
      chosen === null || chosen.id === state.fit?.id ? state.fit : ask(`/v1/fits/${chosen.id}`),
    ]);
    if (mine !== turn) return;
    const old = state.fit;
    Object.assign(state, { loaded, rows, fit: chosen === null ? null : fit });
    if (OPEN.has(state.fit?.state)) state.fit = null;
    drawFit(state.fit);
    if (old?.id !== state.fit?.id || old === null) fitShown(state.fit);
    await draw();
  }

  /** The fit that the choice means now, or null. */
  function resolve(series) {
    if (state.choice === LATEST) return series.latest_fit_id === null ? null : { id: series.latest_fit_id };
    const holdout = state.choice.startsWith(`${LATEST}:`) ? state.choice.slice(LATEST.length + 1) : null;
    const found = state.fits.find((fit) =>
      holdout === null ? fit.id === state.choice : fit.state === "SUCCEEDED" && fit.holdout?.selection === holdout,
    );
    if (found !== undefined || holdout !== null) return found ?? null;
    return /^[0-9a-f-]{36}$/.test(state.choice) ? { id: state.choice } : null;
  }

  function drawChoices(series) {
    const option = (item) => h("option", { value: item.value });
    const name = (element, item) => setText(element, item.text);
    const list = state.all.filter((item) => item.observations > 0 || item.id === state.seriesId);
    keyed(
      byId("series"),
      list.map((item) => ({ value: item.id, text: `${item.label} (${grouped(item.observations)} points)` })),
      (item) => item.value,
      option,
      name,
    );
    byId("series").value = state.seriesId;
    const holdouts = [
      ...new Set(
        state.fits.filter((fit) => fit.state === "SUCCEEDED" && fit.holdout).map((fit) => fit.holdout.selection),
      ),
    ];
    const choices = [
      { value: LATEST, text: series.latest_fit_id === null ? "latest: none yet" : "latest, nothing held out" },
      ...holdouts.map((selection) => ({ value: `${LATEST}:${selection}`, text: `latest, holding out ${selection}` })),
      ...state.fits.map((fit) => ({
        value: fit.id,
        text: [
          timeText(fit.created_at),
          fit.status ?? fit.state,
          fit.n_observations && `${fit.n_observations} points`,
          fit.holdout && `holding out ${fit.holdout.selection}`,
        ]
          .filter(Boolean)
          .join(" · "),
      })),
    ];
    if (!choices.some((item) => item.value === state.choice)) choices.push({ value: state.choice, text: state.choice });
    keyed(byId("fit"), choices, (item) => item.value, option, name);
    byId("fit").value = state.choice;
    const open = state.fits.find((fit) => OPEN.has(fit.state));
    const failed = state.fits[0]?.state === "FAILED" ? `The newest fit failed: ${state.fits[0].reason}` : "";
    if (open) say(`A fit ${open.state === "RUNNING" ? "is running" : "is queued"}; the chart follows when it ends.`);
    else if (series.observations > MOST_OBSERVATIONS)
      say(`The first ${grouped(MOST_OBSERVATIONS)} of ${grouped(series.observations)} observations are shown.`);
    else if (series.latest_fit_id === null)
      say(failed || "No fit yet: the law has seven parameters and needs at least seven different points.");
    else say(failed);
  }

  /** Observations as points of the chart, with their roles in the fit. */
  function chartPoints() {
    const roles = new Map(
      (state.fit?.state === "SUCCEEDED" ? state.fit.observations : []).map((item) => [item.id, item.role]),
    );
    const points = state.rows.map((row) => ({
      n: row.n_params,
      short: row.short_tokens,
      long: row.long_tokens,
      scale: row.scale,
      y: row.log_longppl,
      se: row.log_longppl_se,
      role: roles.size === 0 ? "measured" : (roles.get(row.id) ?? "newer"),
    }));
    const axes = { n_params: sizes(points), short_tokens: shortBudgets(points) };
    for (const point of points)
      Object.assign(point, { n_params: axes.n_params.of(point), short_tokens: axes.short_tokens.of(point) });
    return { points, axes };
  }

  async function draw() {
    if (state.loaded === null) return;
    const mine = ++drawing;
    const { points, axes } = chartPoints();
    drawChips("n_params", "n-chips", axes.n_params.values);
    drawChips("short_tokens", "short-chips", axes.short_tokens.values);
    const facet = controls.elements.panels.value;
    const other = facet === "n_params" ? "short_tokens" : "n_params";
    const visible = points.filter((point) =>
      ["n_params", "short_tokens"].every((axis) => !hidden[axis].has(point[axis])),
    );
    for (const point of visible) Object.assign(point, { panel: point[facet], group: point[other] });
    const used = (axis) => axes[axis].values.filter((value) => visible.some((point) => point[axis] === value.key));
    byId("figure").hidden = points.length === 0;
    byId("no-points").hidden = points.length > 0;
    if (points.length === 0) return;
    const curves = await predictedCurves(visible);
    await loadPlotly();
    if (mine !== drawing) return;
    const colours = theme();
    const [panels, groups] = [used(facet), used(other)];
    const ppl = controls.elements.axis.value === "ppl";
    const { traces, layout } = figure({
      facet,
      panels,
      groups,
      points: visible,
      curves,
      band: byId("band").value,
      level: level(),
      ppl,
      width: byId("chart").clientWidth,
      colours,
    });
    await plot(byId("chart"), traces, layout);
    byId("chart").setAttribute(
      "aria-label",
      `Observed and predicted ${ppl ? "" : "log "}LongPPL over long-context tokens, ${visible.length} points in ${panels.length} panels; the table below holds the numbers`,
    );
    drawLegend(groups, facet, visible, curves, colours);
    drawRows();
  }

  /** The law along D_l for each (N, D_s) that is shown: one request for all of them, kept until something changes. */
  async function predictedCurves(points) {
    if (state.fit?.state !== "SUCCEEDED") return [];
    const curves = new Map();
    const reach = new Map();
    for (const point of points) {
      const long = Number(point.long);
      const [low, high] = reach.get(point.panel) ?? [long, long];
      reach.set(point.panel, [Math.min(low, long), Math.max(high, long)]);
      if (point.short === null) continue; // the law has a term of D_s
      curves.set(`${point.n} ${point.short}`, {
        panel: point.panel,
        group: point.group,
        n: Number(point.n),
        short: Number(point.short),
      });
    }
    const seen = state.fit.ranges?.long_tokens;
    const asked = [...curves.values()].map((curve) => ({
      ...curve,
      xs: along(...reach.get(curve.panel), [seen?.low, seen?.high]),
    }));
    if (asked.length === 0) return [];
    const body = {
      fit: state.fit.id,
      level: level(),
      at: {
        n_params: asked.flatMap((curve) => curve.xs.map(() => curve.n)),
        short_tokens: asked.flatMap((curve) => curve.xs.map(() => curve.short)),
        long_tokens: asked.flatMap((curve) => curve.xs),
      },
    };
    const key = JSON.stringify(body);
    if (state.answer?.key !== key)
      state.answer = { key, predictions: (await ask("/v1/predictions", body)).predictions };
    const predictions = state.answer.predictions;
    let start = 0;
    return asked.map((curve) => ({ ...curve, at: predictions.slice(start, (start += curve.xs.length)) }));
  }

  function drawChips(axis, id, values) {
    if (!chipsTouched) {
      const kept = new Set(spread(values, MOST_SHOWN).map((value) => value.key));
      hidden[axis] = new Set(values.map((value) => value.key).filter((key) => !kept.has(key)));
    }
    const make = (value) => {
      const box = h("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        chipsTouched = true;
        hidden[axis][box.checked ? "delete" : "add"](value.key);
        attempt(draw);
      });
      return h("label", {}, box, h("span", {}, value.label));
    };
    keyed(
      byId(id),
      values,
      (value) => value.key,
      make,
      (label, value) => {
        label.firstElementChild.checked = !hidden[axis].has(value.key);
        setText(label.lastElementChild, value.label);
      },
    );
  }

  function drawLegend(groups, facet, points, curves, colours) {
    const items = groups.map((group, index) =>
      h("li", {}, swatch(index, colour(index, groups.length, colours.ramp)), group.label),
    );
    items.unshift(h("li", { class: "of" }, facet === "n_params" ? h("span", {}, "D", h("sub", {}, "s")) : "N"));
    const looks = {
      fitted: {},
      held_out: { hollow: true },
      excluded: { cross: true },
      newer: { opacity: 0.55 },
      measured: {},
    };
    const roles = Object.keys(ROLES).filter((role) => points.some((point) => point.role === role));
    roles.forEach((role, index) =>
      items.push(h("li", index ? {} : { class: "first" }, swatch(0, colours.muted, looks[role]), ROLES[role])),
    );
    if (points.some((point) => point.se !== null)) items.push(h("li", {}, stroke("error"), "± one standard error"));
    if (curves.length > 0) {
      items.push(h("li", {}, stroke("solid"), "law"), h("li", {}, stroke("dashed"), "law, extrapolated"));
      const band = byId("band");
      if (band.value !== "none")
        items.push(
          h(
            "li",
            {},
            stroke("band"),
            `${Math.round(level() * 100)} % interval: ${band.selectedOptions[0].textContent.trim()}`,
          ),
        );
    }
    byId("legend").replaceChildren(...items);
  }

  function drawRows() {
    if (!byId("rows").open) return;
    const fitted = state.fit?.state === "SUCCEEDED" ? state.fit.observations : [];
    const known = new Map(fitted.map((item) => [item.id, item]));
    rebuild(byId("rows-table"), [state.loaded, state.fit?.id ?? null], () => {
      const head = ["Scale", "N", "D_s", "D_l", "log LongPPL", "± SE", "Predicted", "Low", "High", "Role"].map(
        (text, index) => h("th", { scope: "col", class: index && index < 9 ? "number" : null }, text),
      );
      const body = state.rows
        .toSorted(bySizes)
        .slice(0, MOST_ROWS)
        .map((row) => {
          const item = known.get(row.id);
          const cells = [
            grouped(row.n_params),
            orUnknown(row.short_tokens),
            grouped(row.long_tokens),
            fixed(row.log_longppl, 4),
            precise(row.log_longppl_se, 2),
            fixed(item?.predicted, 4),
            fixed(item?.low, 4),
            fixed(item?.high, 4),
          ];
          return h(
            "tr",
            {},
            h("th", { scope: "row" }, row.scale),
            ...cells.map((text) => h("td", { class: "number" }, text)),
            h("td", {}, (item?.role ?? "newer").replace("_", " ") + (item?.reason ? `: ${item.reason}` : "")),
          );
        });
      const more = state.rows.length - body.length;
      const note =
        more > 0
          ? h("p", { class: "small" }, `and ${grouped(more)} more: /v1/observations?series=${state.seriesId}`)
          : null;
      return [h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...body)), note].filter(Boolean);
    });
  }

  return {
    refresh,
    /** Shows a series of this grid, unless one of them is shown already. */
    follow: (grid) => {
      if (grid.series.length === 0 || grid.series.includes(state.seriesId)) return;
      if (state.all.length === 0) {
        state.seriesId ??= grid.series[0]; // what the address names stands
        return;
      }
      const withFit = state.all.find((item) => grid.series.includes(item.id) && item.latest_fit_id);
      choose({ seriesId: withFit?.id ?? grid.series[0], choice: LATEST });
    },
    isBusy: () => state.fits.some((fit) => OPEN.has(fit.state)),
    chosen: () => ({ series: state.seriesId, fit: state.choice === LATEST ? null : state.choice }),
    level,
  };
}

/** Points of a curve, evenly along the log axis and at the ends of what was fitted, where a line turns dashed. */
function along(low, high, ends) {
  const top = high * BEYOND;
  const even = Array.from({ length: CURVE_POINTS }, (_, index) => low * (top / low) ** (index / (CURVE_POINTS - 1)));
  const inside = ends.filter((end) => end !== null && end !== undefined && end > low && end < top);
  return [...new Set([...even, ...inside])].sort((a, b) => a - b);
}
