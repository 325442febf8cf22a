// What probes found in the models of the chosen grid: pass key, needle, loss by position, retrieval heads.

import { bySizes, orUnknown, shortBudgets } from "./budgets.js";
import { SYMBOLS, swatch } from "./chart.js";
import { byId, grouped, h, keyed, rebuild, setText, short, significant } from "./page.js";
import { colour, countAxis, frame, loadPlotly, plain, plot, redrawn, theme } from "./plot.js";
import { ask, isAnswer } from "./service.js";

const PAGE = 1_000;
const MOST_NUMBERS = 20_000;
const HEIGHT = 330;
const READS_WHITE = 0.47; // below, white is read more easily than black on the colour scale
const CHARTS = ["passkey", "needle", "position", "heads"];
const PERCENT = (share) => `${Math.round(100 * share)} %`;

/** The section; `follow(grid)` shows another grid's numbers, or what has come of the same one. */
export function probesView() {
  let gridId = null;
  let asked = null; // what the grid was when it was last asked for
  let pages = []; // rows only ever come at the end: full pages are kept
  let models = [];
  let drawing = 0;
  byId("probed").addEventListener("change", () => attempt(draw));
  byId("needle-length").addEventListener("change", () => attempt(draw));
  byId("probe-rows").addEventListener("toggle", drawRows);
  redrawn(byId("probe-charts"), () => attempt(draw));

  function attempt(action) {
    action().catch((error) => {
      if (!isAnswer(error)) console.error(error);
      say(error.message);
    });
  }

  function say(text) {
    byId("probes-note").hidden = text === "";
    setText(byId("probes-note"), text);
  }

  async function follow(grid) {
    if (grid === null) return;
    const now = JSON.stringify([grid.id, grid.state, grid.scales.map((scale) => scale.evaluations)]);
    if (now === asked) return;
    if (gridId !== grid.id) pages = [];
    [asked, gridId] = [now, grid.id];
    const path = `/v1/grids/${encodeURIComponent(grid.id)}/metrics?limit=${PAGE}`;
    const found = pages.slice(0, -1);
    let cursor = pages.at(-1)?.cursor ?? null;
    let page;
    try {
      do {
        page = await ask(path + (cursor === null ? "" : `&cursor=${encodeURIComponent(cursor)}`));
        found.push({ cursor, items: page.items });
        cursor = page.next_cursor;
      } while (cursor !== null && found.length * PAGE < MOST_NUMBERS);
    } catch (error) {
      asked = null;
      throw error;
    }
    if (asked !== now) return;
    pages = found;
    models = modelsOf(pages.flatMap((item) => item.items));
    setText(byId("probes-grid"), grid.name);
    byId("probes").hidden = models.length === 0;
    say(cursor === null ? "" : `The first ${grouped(MOST_NUMBERS)} numbers are shown; the service has more.`);
    await draw();
  }

  async function draw() {
    if (byId("probes").hidden) return;
    const mine = ++drawing;
    drawChoices();
    await loadPlotly();
    if (mine !== drawing) return;
    const colours = theme();
    const chosen = models.find((model) => model.key === byId("probed").value);
    const length = Number(byId("needle-length").value);
    const kin = models.filter((model) => model.trajectory === chosen.trajectory && model.numbers.has("position_loss"));
    const present = {
      passkey: chosen.numbers.has("passkey_accuracy"),
      needle: models.some((model) => model.numbers.has("needle_nll")),
      position: kin.length > 0,
      heads: models.some((model) => model.numbers.has("retrieval_heads")),
    };
    for (const name of CHARTS) byId(`${name}-figure`).hidden = !present[name];
    const { scales, budgets, look } = looks(colours);
    const needle = (model) => pooled((model.numbers.get("needle_nll") ?? []).filter((row) => row.length === length));
    const heads = (model) => model.numbers.get("retrieval_heads")?.[0].value ?? null;
    const drawn = [];
    if (present.passkey) drawn.push(drawPasskey(chosen, colours));
    if (present.needle)
      drawn.push(drawOverTokens("needle-chart", look, needle, "loss of the needle, nats per token", colours));
    if (present.position) drawn.push(drawPositions(kin, chosen, colours));
    if (present.heads)
      drawn.push(drawOverTokens("heads-chart", look, heads, "retrieval heads", colours, { rangemode: "tozero" }));
    await Promise.all(drawn);
    drawLegend(scales, budgets, colours);
    drawRows();
  }

  function drawChoices() {
    const option = (item) => h("option", { value: item.key });
    const name = (element, item) => setText(element, item.label);
    const before = byId("probed").value;
    keyed(byId("probed"), models, (model) => model.key, option, name);
    const known = models.find((model) => model.key === before);
    const first = models.findLast((model) => model.numbers.has("passkey_accuracy")) ?? models.at(-1);
    byId("probed").value = (known ?? first).key;
    const lengths = [
      ...new Set(models.flatMap((model) => (model.numbers.get("needle_nll") ?? []).map((row) => row.length))),
    ].sort((a, b) => b - a);
    keyed(
      byId("needle-length"),
      lengths.map((length) => ({ key: length, label: `${grouped(length)} tokens` })),
      (item) => item.key,
      option,
      name,
    );
    byId("needle-length-choice").hidden = lengths.length < 2;
  }

  /** One look for each scale, D_s, rule and pair of seeds: its colour is the scale's, its symbol tells D_s apart. */
  function looks(colours) {
    const names = [...new Set(models.map((model) => model.scale))];
    const scales = names.map((name, index) => ({ name, paint: colour(index, names.length, colours.ramp) }));
    const size = ({ row }) => ({ n: row.n_params, short: row.short_tokens });
    const budgets = shortBudgets(models.map(size));
    const keys = [...new Set(models.map((model) => model.trajectory))];
    const look = keys.map((key) => {
      const own = models.filter((model) => model.trajectory === key);
      const budget = budgets.of(size(own[0]));
      return {
        models: own,
        label: own[0].trajectoryLabel,
        paint: scales.find((scale) => scale.name === own[0].scale).paint,
        symbol: budgets.values.findIndex((value) => value.key === budget),
      };
    });
    return { scales, budgets: budgets.values, look };
  }

  function drawPasskey(model, colours) {
    const rows = model.numbers.get("passkey_accuracy");
    const lengths = [...new Set(rows.map((row) => row.length))].sort((a, b) => a - b);
    const depths = [...new Set(rows.map((row) => row.depth))].sort((a, b) => a - b);
    const at = (depth, length) => rows.find((row) => row.depth === depth && row.length === length);
    const grid = (write) => depths.map((depth) => lengths.map((length) => write(at(depth, length))));
    const element = byId("passkey-chart");
    const trace = {
      type: "heatmap",
      meta: "passkey",
      x: lengths.map(short),
      y: depths.map(PERCENT),
      z: grid((row) => row?.value ?? null),
      text: grid((row) => (row === undefined ? "" : PERCENT(row.value))),
      customdata: grid((row) => row?.count ?? null),
      hovertemplate: "length %{x}, depth %{y}<br>%{text} of %{customdata} samples right<extra></extra>",
      zmin: 0,
      zmax: 1,
      colorscale: "Cividis", // one order for every kind of sight, and in grey
      xgap: 2,
      ygap: 2,
      colorbar: { thickness: 10, outlinewidth: 0, tickformat: ".0%", tickfont: { size: 11, color: colours.muted } },
    };
    const numbers = {
      meta: "numbers",
      x: rows.map((row) => short(row.length)),
      y: rows.map((row) => PERCENT(row.depth)),
      text: rows.map((row) => PERCENT(row.value)),
      mode: "text",
      textfont: { size: 13, color: rows.map((row) => (row.value < READS_WHITE ? "#fff" : "#000")) },
      hoverinfo: "skip",
    };
    const layout = frame({
      width: element.clientWidth,
      height: HEIGHT,
      x: { type: "category", label: "length of the context, tokens", showgrid: false },
      y: { type: "category", label: "depth of the pass key", showgrid: false, autorange: "reversed" },
      colours,
    });
    return plot(element, [trace, numbers], layout);
  }

  function drawPositions(kin, chosen, colours) {
    const element = byId("position-chart");
    const traces = kin.map((model, index) => {
      const rows = model.numbers.get("position_loss").toSorted((a, b) => a.length - b.length);
      return {
        name: model.stage,
        meta: "position",
        x: rows.map(middle),
        y: rows.map((row) => row.value),
        text: rows.map(
          (row) =>
            `<b>${plain(model.stage)}</b><br>positions ${plain(row.label ?? `up to ${row.length}`)}<br>${significant(row.value, 4)} nats per token`,
        ),
        hovertemplate: "%{text}<extra></extra>",
        mode: "lines+markers",
        line: { color: colour(index, kin.length, colours.ramp), width: model === chosen ? 3 : 1.4 },
        marker: { size: model === chosen ? 7 : 4, symbol: model.followUp === null ? "circle" : "circle-open" },
      };
    });
    const items = kin.map((model, index) => {
      const mark = swatch(0, colour(index, kin.length, colours.ramp), { hollow: model.followUp !== null });
      return h("li", model === chosen ? { class: "of" } : {}, mark, model.stage);
    });
    byId("position-legend").replaceChildren(...items);
    const width = element.clientWidth;
    const layout = frame({
      width,
      height: HEIGHT,
      x: {
        ...countAxis(
          traces.flatMap((trace) => trace.x),
          width,
        ),
        label: "position in the document, tokens",
      },
      y: { label: "loss, nats per token" },
      colours,
    });
    return plot(element, traces, layout);
  }

  function drawOverTokens(id, look, valueOf, label, colours, axis = {}) {
    const element = byId(id);
    const known = look.flatMap((item) => item.models).filter((model) => valueOf(model) !== null);
    const positive = known.map((model) => model.long).filter((long) => long > 0);
    const zero = (positive.length > 0 ? Math.min(...positive) : 1) / 2; // a log axis has no place for D_l = 0
    const place = (model) => (model.long > 0 ? model.long : zero);
    const traces = look.flatMap(({ models: own, label: name, paint, symbol }) => {
      const found = own.filter((model) => valueOf(model) !== null);
      const part = (followUps) => found.filter((model) => (model.followUp !== null) === followUps);
      return [false, true].map((followUps) => ({
        name,
        meta: followUps ? "follow-up" : "long",
        x: part(followUps).map(place),
        y: part(followUps).map(valueOf),
        text: part(followUps).map(
          (model) =>
            `<b>${plain(name)}</b><br>${plain(model.stage)}<br>${plain(label)}: ${significant(valueOf(model), 4)}`,
        ),
        hovertemplate: "%{text}<extra></extra>",
        mode: followUps ? "markers" : "lines+markers",
        line: { color: paint, width: 1.6 },
        marker: {
          color: paint,
          size: followUps ? 10 : 7,
          symbol: SYMBOLS[symbol % SYMBOLS.length] + (followUps ? "-open" : ""),
        },
      }));
    });
    const width = element.clientWidth;
    const x = countAxis(known.map(place), width);
    if (known.some((model) => model.long === 0)) {
      x.tickvals = [zero, ...x.tickvals.filter((value) => value > zero)];
      x.ticktext = ["0", ...x.tickvals.slice(1).map(short)];
    }
    const layout = frame({
      width,
      height: HEIGHT,
      x: { ...x, label: "D<sub>l</sub>, long-context tokens" },
      y: { ...axis, label },
      colours,
    });
    return plot(
      element,
      traces.filter((trace) => trace.x.length > 0),
      layout,
    );
  }

  function drawLegend(scales, budgets, colours) {
    const items = scales.map((scale) => h("li", {}, swatch(0, scale.paint), scale.name));
    items.push(h("li", { class: "of first" }, h("span", {}, "D", h("sub", {}, "s"))));
    items.push(...budgets.map((value, index) => h("li", {}, swatch(index, colours.muted), value.label)));
    const names = [...new Set(models.map((model) => model.followUp).filter((name) => name !== null))];
    if (names.length > 0)
      items.push(h("li", { class: "first" }, swatch(0, colours.muted, { hollow: true }), `after ${names.join(", ")}`));
    byId("probe-legend").replaceChildren(...items);
  }

  function drawRows() {
    if (!byId("probe-rows").open) return;
    const chosen = models.find((model) => model.key === byId("probed").value);
    const rows = [...chosen.numbers.values()].flat();
    rebuild(byId("probe-table"), [chosen.key, rows.length], () => {
      const head = ["Metric", "Length", "Depth", "Of", "Value", "Samples or tokens"];
      const body = rows.map((row) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, row.metric.replaceAll("_", " ")),
          h("td", { class: "number" }, row.length === null ? "–" : grouped(row.length)),
          h("td", { class: "number" }, row.depth === null ? "–" : PERCENT(row.depth)),
          h("td", {}, row.label ?? "–"),
          h("td", { class: "number" }, significant(row.value, 4)),
          h("td", { class: "number" }, grouped(row.count)),
        ),
      );
      const classes = [null, "number", "number", null, "number", "number"];
      const headRow = head.map((text, index) => h("th", { scope: "col", class: classes[index] }, text));
      return [h("table", {}, h("thead", {}, h("tr", {}, ...headRow)), h("tbody", {}, ...body))];
    });
  }

  return { follow, attempt: (grid) => attempt(() => follow(grid)) };
}

/** The models that numbers are of, by N, D_s, D_l, each with its numbers by metric. */
function modelsOf(rows) {
  const found = new Map();
  for (const row of rows) {
    if (!found.has(row.evaluation_id)) found.set(row.evaluation_id, { row, numbers: new Map() });
    const { numbers } = found.get(row.evaluation_id);
    numbers.set(row.metric, [...(numbers.get(row.metric) ?? []), row]);
  }
  const several = (name) => new Set(rows.map((row) => row[name])).size > 1;
  const seeds = several("short_seed") || several("long_seed");
  const rules = several("rule");
  return [...found]
    .map(([key, { row, numbers }]) => {
      const trajectoryLabel = [
        `${row.scale} · D_s ${orUnknown(row.short_tokens, short)}`,
        rules ? row.rule : null,
        seeds ? `seeds ${row.short_seed}, ${row.long_seed}` : null,
      ]
        .filter((part) => part !== null)
        .join(" · ");
      const stage = `D_l ${short(row.long_tokens)}${row.follow_up === null ? "" : `, after ${row.follow_up}`}`;
      return {
        key,
        numbers,
        row,
        stage,
        trajectoryLabel,
        label: `${trajectoryLabel} · ${stage}`,
        trajectory: JSON.stringify([row.scale, row.short_tokens, row.rule, row.short_seed, row.long_seed].map(String)),
        scale: row.scale,
        long: Number(row.long_tokens),
        followUp: row.follow_up,
      };
    })
    .sort((a, b) => bySizes(a.row, b.row) || (a.followUp ?? "").localeCompare(b.followUp ?? ""));
}

/** The mean over all tokens of rows that each hold a mean; null without rows. */
function pooled(rows) {
  const count = rows.reduce((sum, row) => sum + Number(row.count), 0);
  return count === 0 ? null : rows.reduce((sum, row) => sum + row.value * Number(row.count), 0) / count;
}

/** The middle, on a log axis, of a bin of positions such as "64-127". */
function middle(row) {
  const [first, last] = (row.label ?? "").split("-").map(Number);
  return last >= first && first > 0 ? Math.sqrt(first * last) : Number(row.length);
}
