// How training of the chosen grid went: one line for each trajectory, its segments joined, one colour for each scale.

import { spread } from "./budgets.js";
import { stroke, swatch } from "./chart.js";
import { STAGES } from "./grids.js";
import { byId, grouped, h, keyed, rebuild, setText, short, significant } from "./page.js";
import { colour, countAxis, frame, loadPlotly, plain, plot, redrawn, theme } from "./plot.js";
import { ask, isAnswer } from "./service.js";

const MOST_SCALES = 6; // that are drawn before a person chooses
const MOST_SEGMENTS = 96; // that are drawn, all scales together
const POINTS = 200; // of a segment
const MOST_ROWS = 200;
const OPEN = new Set(["PENDING", "READY", "RUNNING"]);

/** What can be shown, and how; `scale` is the kind of axis. */
const VALUES = {
  loss: { label: "loss, nats per token", digits: 4, scale: "linear" },
  gradient_norm: { label: "norm of the gradient", digits: 3, scale: "log" },
  learning_rate: { label: "learning rate", digits: 3, scale: "linear", rangemode: "tozero", exponentformat: "e" },
  tokens_per_s: { label: "tokens per second", digits: 3, scale: "linear", rangemode: "tozero", exponentformat: "B" },
  mfu: {
    label: "MFU: model's operations, share of the peak",
    digits: 3,
    scale: "linear",
    rangemode: "tozero",
    tickformat: ".0%",
  },
};

/** The section; `follow(grid)` shows another grid's training, or what has come of the same one. */
export function trainingView() {
  let grid = null;
  let asked = null; // what the grid was when it was last asked for
  let series = [];
  let cut = [];
  let drawing = 0;
  const hidden = new Set();
  const controls = byId("training-controls");
  byId("training-value").addEventListener("change", () => attempt(draw));
  controls.elements["training-axis"].forEach((radio) => radio.addEventListener("change", () => attempt(draw)));
  byId("training-rows").addEventListener("toggle", drawRows);
  redrawn(byId("training-chart"), () => attempt(draw));

  function attempt(action) {
    action().catch((error) => {
      if (!isAnswer(error)) console.error(error);
      say(error.message);
    });
  }

  function say(text) {
    byId("training-note").hidden = text === "";
    setText(byId("training-note"), text);
  }

  async function follow(chosen) {
    if (chosen === null) return;
    if (grid?.id !== chosen.id) {
      series = [];
      hidden.clear();
      const names = chosen.scales.map((scale) => scale.scale);
      const kept = new Set(spread(names, MOST_SCALES));
      names.filter((name) => !kept.has(name)).forEach((name) => hidden.add(name));
    }
    grid = chosen;
    await load();
  }

  async function load() {
    const names = grid.scales.map((scale) => scale.scale);
    const shown = names.filter((name) => !hidden.has(name));
    const now = JSON.stringify([grid.id, grid.state, shown, String(grid.tokens_done), grid.attempts.length]);
    if (now === asked) return;
    asked = now;
    const limit = Math.max(4, Math.floor(MOST_SEGMENTS / Math.max(1, shown.length)));
    const path = `/v1/grids/${encodeURIComponent(grid.id)}/training?points=${POINTS}&limit=${limit}`;
    let pages;
    try {
      pages = await Promise.all(shown.map((name) => ask(`${path}&scale=${encodeURIComponent(name)}`)));
    } catch (error) {
      asked = null;
      throw error;
    }
    if (asked !== now) return;
    series = pages.flatMap((page) => page.items).map(placed);
    setText(byId("training-grid"), grid.name);
    cut = shown.filter((_, index) => pages[index].next_cursor !== null);
    byId("training").hidden = series.every((item) => item.at.length === 0) && hidden.size === 0;
    say(cut.length === 0 ? "" : `The first ${limit} segments of ${cut.join(", ")} are drawn; the service has more.`);
    await draw();
  }

  async function draw() {
    if (grid === null || byId("training").hidden) return;
    const mine = ++drawing;
    const names = grid.scales.map((scale) => scale.scale);
    drawChips(names);
    const withMfu = series.some((item) => item.points.some((point) => point.mfu !== null));
    byId("training-mfu").hidden = byId("training-mfu").disabled = !withMfu;
    if (!withMfu && byId("training-value").value === "mfu") byId("training-value").value = "loss";
    await loadPlotly();
    if (mine !== drawing) return;
    const colours = theme();
    const value = byId("training-value").value;
    const paints = new Map(names.map((name, index) => [name, colour(index, names.length, colours.ramp)]));
    const traces = [...paints].flatMap(([name, paint]) => scaleTraces(name, paint, value));
    const width = byId("training-chart").clientWidth;
    const { label, scale, digits: _, ...rest } = VALUES[value];
    const log = controls.elements["training-axis"].value === "log";
    const xs = traces.flatMap((trace) => trace.x.filter((x) => x !== null));
    const x = log && xs.length > 0 ? countAxis(xs, width, 1.05) : { exponentformat: "B", rangemode: "tozero" };
    const layout = frame({
      width,
      height: 380,
      x: { ...x, label: "tokens trained along the trajectory" },
      y: { ...rest, label, type: scale },
      colours,
    });
    await plot(byId("training-chart"), traces, layout);
    byId("training-chart").setAttribute(
      "aria-label",
      `${label} over tokens, ${series.length} segments; the table below holds the newest numbers`,
    );
    drawLegend(
      names.filter((name) => series.some((item) => item.scale === name)),
      paints,
      colours,
    );
    drawRows();
  }

  /** Lines of a scale, the joints between its segments, and where those are that train now. */
  function scaleTraces(name, paint, value) {
    const own = series.filter((item) => item.scale === name);
    const line = { x: [], y: [], text: [] };
    const joint = { x: [], y: [] };
    const live = { x: [], y: [], text: [] };
    for (const item of own) {
      const points = item.at.filter((point) => point[value] !== null);
      const from = joined(item, value);
      if (from && points.length > 0) {
        joint.x.push(from.x, points[0].x, null);
        joint.y.push(from[value], points[0][value], null);
      }
      for (const point of [...points, null]) {
        line.x.push(point?.x ?? null);
        line.y.push(point?.[value] ?? null);
        line.text.push(point === null ? "" : said(item, point, value));
      }
      const last = points.at(-1);
      if (item.state !== "RUNNING" || last === undefined) continue;
      live.x.push(last.x);
      live.y.push(last[value]);
      live.text.push(`${said(item, last, value)}<br>training now`);
    }
    const hover = "%{text}<extra></extra>";
    const marks = joint.x.map((_, index) => (index % 3 === 0 ? 6 : 0));
    return [
      { meta: "line", ...line, mode: "lines", line: { color: paint, width: 1.6 }, hovertemplate: hover },
      {
        meta: "joint",
        ...joint,
        mode: "lines+markers",
        line: { color: paint, width: 1.6, dash: "2px,3px" },
        marker: { color: paint, size: marks, line: { width: 0 } },
        hoverinfo: "skip",
      },
      {
        meta: "live",
        ...live,
        mode: "markers",
        marker: { color: paint, symbol: "circle-open", size: 11, line: { width: 2 } },
        hovertemplate: hover,
      },
    ]
      .filter((trace) => trace.x.length > 0)
      .map((trace) => ({ name, ...trace }));
  }

  /** The parent's last point before the segment leaves it. */
  function joined(item, value) {
    const parent = series.find((other) => other.segment === item.parent);
    return parent?.at.findLast((point) => point.step <= item.parent_step && point[value] !== null);
  }

  function drawChips(names) {
    byId("training-scale-choice").hidden = names.length < 2;
    const make = (name) => {
      const box = h("input", { type: "checkbox" });
      box.addEventListener("change", () => {
        hidden[box.checked ? "delete" : "add"](name);
        attempt(load);
      });
      return h("label", {}, box, h("span", {}, name));
    };
    keyed(
      byId("training-scales"),
      names,
      (name) => name,
      make,
      (label, name) => {
        label.firstElementChild.checked = !hidden.has(name);
      },
    );
  }

  function drawLegend(names, paints, colours) {
    const items = names.map((name) => h("li", {}, swatch(0, paints.get(name)), name));
    const joins = series.some((item) => item.parent !== null);
    if (joins) items.push(h("li", { class: "first" }, stroke("dashed"), "goes on from a checkpoint"));
    if (series.some((item) => item.state === "RUNNING" && item.at.length > 0))
      items.push(h("li", joins ? {} : { class: "first" }, swatch(0, colours.muted, { hollow: true }), "training now"));
    byId("training-legend").replaceChildren(...items);
  }

  function drawRows() {
    if (!byId("training-rows").open) return;
    rebuild(byId("training-table"), [asked, series.length], () => {
      const head = ["Scale", "Stage", "State", "Tokens", "Loss", "Gradient norm", "Learning rate", "Tokens/s", "MFU"];
      const rows = series.slice(0, MOST_ROWS).map((item) => {
        const last = item.at.at(-1);
        const cells = [
          last === undefined ? "–" : grouped(Math.round(last.x)),
          significant(last?.loss, VALUES.loss.digits),
          significant(last?.gradient_norm, VALUES.gradient_norm.digits),
          significant(last?.learning_rate, VALUES.learning_rate.digits),
          last?.tokens_per_s == null ? "–" : grouped(Math.round(last.tokens_per_s)),
          last?.mfu == null ? "–" : `${significant(100 * last.mfu, 3)} %`,
        ];
        return h(
          "tr",
          {},
          h("th", { scope: "row" }, item.scale),
          h("td", {}, STAGES[item.kind]),
          h("td", {}, item.state.toLowerCase()),
          ...cells.map((text) => h("td", { class: "number" }, text)),
        );
      });
      const headRow = head.map((text, index) => h("th", { scope: "col", class: index > 2 ? "number" : null }, text));
      return [h("table", {}, h("thead", {}, h("tr", {}, ...headRow)), h("tbody", {}, ...rows))];
    });
  }

  return { follow, attempt: (chosen) => attempt(() => follow(chosen)) };
}

/** A series with its points along the trajectory; a running one ends where its newest report is. */
function placed(item) {
  const [start, size] = [Number(item.tokens_before), Number(item.tokens_per_step)];
  const at = item.points.map((point) => ({ ...point, x: start + Number(point.step) * size }));
  const { live } = item;
  if (live !== null && OPEN.has(item.state) && live.step > (at.at(-1)?.step ?? 0))
    at.push({ gradient_norm: null, learning_rate: null, mfu: null, ...live, x: start + Number(live.step) * size });
  return { ...item, at };
}

function said(item, point, value) {
  const { label, digits } = VALUES[value];
  const number = value === "tokens_per_s" ? short(point[value]) : significant(point[value], digits);
  return `<b>${plain(item.scale)}</b>, ${STAGES[item.kind]}<br>step ${grouped(point.step)}, ${short(point.x)} tokens<br>${label}: ${number}`;
}
