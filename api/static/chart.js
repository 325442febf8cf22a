// The chart as Plotly wants it: one panel per N (or per D_s), colour and symbol for the other, D_l along a log axis.

import { orUnknown } from "./budgets.js";
import { grouped, h, short, significant } from "./page.js";
import { axis, base, colour, countAxis, plain } from "./plot.js";

export const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon"];
const SHAPES = [
  "M6 1.6A4.4 4.4 0 1 0 6 10.4 4.4 4.4 0 0 0 6 1.6z",
  "M2 2h8v8H2z",
  "M6 .8 11.2 6 6 11.2.8 6z",
  "M6 1.2 11.2 10.2H.8z",
  "M6 10.8 11.2 1.8H.8z",
  "M6 1 11.2 4.8 9.2 10.8H2.8L.8 4.8z",
];
const SVG = "http://www.w3.org/2000/svg";
const MIN_PANEL_WIDTH = 210;
const GAP = { across: 24, acrossWithTicks: 50, down: 84 };
const ALIKE = 1.3; // panels whose values span about as much as all together share one axis
const MARGIN = { l: 72, r: 14, t: 34, b: 58 };

/** Roles of points, in the order that a legend names them. */
export const ROLES = {
  fitted: "fitted",
  held_out: "held out: the fit has not seen it",
  excluded: "excluded from the fit",
  newer: "newer than the fit",
  measured: "measured, not fitted yet",
};
const MARKERS = {
  fitted: { suffix: "", opacity: 1 },
  held_out: { suffix: "-open", opacity: 1 },
  excluded: { suffix: "", symbol: "x-thin-open", opacity: 1 },
  newer: { suffix: "-dot", opacity: 0.55 },
  measured: { suffix: "", opacity: 1 },
};

/** A point's mark for the legend: a filled shape, or a hollow one. */
export function swatch(index, paint, { hollow = false, cross = false, opacity = 1 } = {}) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" }))
    svg.setAttribute(name, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", cross ? "M2 2 10 10M10 2 2 10" : SHAPES[index % SHAPES.length]);
  path.setAttribute("fill", hollow || cross ? "none" : paint);
  path.setAttribute("stroke", paint);
  path.setAttribute("stroke-width", "1.6");
  path.setAttribute("opacity", String(opacity));
  svg.append(path);
  return svg;
}

/** A line or a band for the legend. */
export const stroke = (kind) => h("span", { class: `stroke ${kind}`, "aria-hidden": "true" });

/**
 * Traces and layout.
 *
 * `facet` is what panels differ by, n_params or short_tokens; `panels` and `groups` are lists of `{ key, label }`, and points and curves name theirs. A curve's `at` holds the service's
 * predictions along D_l. With `ppl` the axis shows LongPPL, else its logarithm.
 */
export function figure({ facet, panels, groups, points, curves, band, level, ppl, width, colours }) {
  const rows = Math.ceil(panels.length / Math.max(1, Math.floor((width - MARGIN.l - MARGIN.r) / MIN_PANEL_WIDTH)));
  const columns = Math.ceil(panels.length / rows);
  const panelHeight = rows === 1 ? 350 : 250;
  const area = { width: width - MARGIN.l - MARGIN.r, height: rows * panelHeight + (rows - 1) * GAP.down };
  const value = ppl ? Math.exp : (log) => log;
  const { ranges, shared } = valueRanges(panels, points, curves, value);
  const decimals = Math.max(0, -Math.floor(Math.log10((ranges[0][1] - ranges[0][0]) / 7)));
  const across = shared ? GAP.across : GAP.acrossWithTicks;
  const traces = [];
  const layout = {
    ...base(width, area.height + MARGIN.t + MARGIN.b, MARGIN, colours),
    annotations: [
      note("D<sub>l</sub>, long-context tokens", { x: 0.5, y: 0, yshift: -50 }),
      note(`${ppl ? "LongPPL" : "log LongPPL, nats per token"}${shared ? "" : " (one scale, shifted by panel)"}`, {
        x: 0,
        y: 0.5,
        xshift: -58,
        xanchor: "center",
        textangle: -90,
      }),
    ],
  };
  panels.forEach((panel, index) => {
    const [row, column] = [Math.floor(index / columns), index % columns];
    const cellWidth = (area.width - (columns - 1) * across) / columns;
    const left = (column * (cellWidth + across)) / area.width;
    const top = 1 - (row * (panelHeight + GAP.down)) / area.height;
    const domain = { x: [left, left + cellWidth / area.width], y: [Math.max(0, top - panelHeight / area.height), top] };
    const number = index === 0 ? "" : String(index + 1);
    const [mine, curvesHere] = [points, curves].map((list) => list.filter((item) => item.panel === panel.key));
    layout[`xaxis${number}`] = {
      ...axis(colours),
      ...longAxis(mine, curvesHere, cellWidth),
      domain: domain.x,
      anchor: `y${number}`,
      showline: true,
    };
    layout[`yaxis${number}`] = {
      ...axis(colours),
      range: ranges[index],
      domain: domain.y,
      anchor: `x${number}`,
      showticklabels: column === 0 || !shared,
      nticks: 7,
      tickformat: `.${decimals}f`,
      ...(number && shared && { matches: "y" }),
    };
    layout.annotations.push(
      note(`<b>${facet === "n_params" ? "" : "D<sub>s</sub> = "}${plain(panel.label)}</b>`, {
        x: domain.x[0],
        y: domain.y[1],
        xanchor: "left",
        yanchor: "bottom",
        yshift: 6,
        font: { size: 12, color: colours.text },
      }),
    );
    groups.forEach((group, place) => {
      const style = {
        axes: { xaxis: `x${number}`, yaxis: `y${number}` },
        paint: colour(place, groups.length, colours.ramp),
        symbol: SYMBOLS[place % SYMBOLS.length],
        label: group.label,
      };
      for (const curve of curvesHere.filter((item) => item.group === group.key))
        traces.push(...curveTraces(curve, style, { band, level, value, ppl }));
    });
    groups.forEach((group, place) => {
      const style = {
        axes: { xaxis: `x${number}`, yaxis: `y${number}` },
        paint: colour(place, groups.length, colours.ramp),
        symbol: SYMBOLS[place % SYMBOLS.length],
        label: group.label,
      };
      const own = mine.filter((item) => item.group === group.key);
      for (const role of Object.keys(ROLES))
        traces.push(
          ...pointTraces(
            own.filter((item) => item.role === role),
            role,
            style,
            { value, ppl },
          ),
        );
    });
  });
  return { traces, layout };

  function note(text, place) {
    return { text, showarrow: false, xref: "paper", yref: "paper", font: { size: 12, color: colours.muted }, ...place };
  }
}

function curveTraces(curve, style, { band, level, value, ppl }) {
  const { axes, paint, label } = style;
  const xs = curve.at.map((point) => point.long_tokens);
  const traces = [];
  const [low, high] = { law: ["low", "high"], measurement: ["prediction_low", "prediction_high"] }[band] ?? [];
  const known = low ? curve.at.filter((point) => point[low] !== null && point[high] !== null) : [];
  if (known.length > 1) {
    const there = known.map((point) => point.long_tokens);
    traces.push({
      ...axes,
      name: `${label}: interval`,
      meta: "band",
      x: [...there, ...there.slice().reverse()],
      y: [...known.map((point) => value(point[low])), ...known.map((point) => value(point[high])).reverse()],
      mode: "lines",
      line: { width: 0 },
      fill: "toself",
      fillcolor: `${paint}26`,
      hoverinfo: "skip",
    });
  }
  const outside = curve.at.map((point) => Math.max(...Object.values(point.extrapolation)) > 1);
  const solid = curve.at.map((point, index) => (outside[index] ? null : value(point.log_longppl)));
  const dashed = curve.at.map((point, index) =>
    outside[index] || outside[index - 1] || outside[index + 1] ? value(point.log_longppl) : null,
  );
  const said = curve.at.map((point) => {
    const interval =
      point.low === null
        ? "no interval"
        : `${percentText(level)} of the law: ${shown(value(point.low), ppl)} … ${shown(value(point.high), ppl)}`;
    return `<b>${plain(label)}</b><br>D<sub>l</sub> ${short(point.long_tokens)}<br>predicted ${shown(value(point.log_longppl), ppl)}<br>${interval}`;
  });
  for (const [meta, y, dash] of [
    ["predicted", solid, "solid"],
    ["extrapolated", dashed, "5px,4px"],
  ]) {
    if (y.every((item) => item === null)) continue;
    traces.push({
      ...axes,
      name: label,
      meta,
      x: xs,
      y,
      mode: "lines",
      line: { color: paint, width: 1.8, dash },
      text: said,
      hovertemplate: "%{text}<extra></extra>",
    });
  }
  return traces;
}

function pointTraces(points, role, style, { value, ppl }) {
  if (points.length === 0) return [];
  const { axes, paint, symbol, label } = style;
  const marker = MARKERS[role];
  const errors = points.map((point) =>
    point.se === null
      ? [0, 0]
      : [value(point.y + point.se) - value(point.y), value(point.y) - value(point.y - point.se)],
  );
  const trace = {
    ...axes,
    name: `${label}: ${ROLES[role]}`,
    meta: role,
    x: points.map((point) => Number(point.long)),
    y: points.map((point) => value(point.y)),
    mode: "markers",
    marker: {
      color: paint,
      symbol: marker.symbol ?? symbol + marker.suffix,
      size: 8,
      opacity: marker.opacity,
      line: { color: paint, width: 1.6 },
    },
    text: points.map((point) => pointText(point, label, role, value, ppl)),
    hovertemplate: "%{text}<extra></extra>",
  };
  if (points.some((point) => point.se !== null)) {
    trace.error_y = {
      type: "data",
      symmetric: false,
      array: errors.map(([up]) => up),
      arrayminus: errors.map(([, down]) => down),
      color: paint,
      thickness: 1.2,
      width: 3,
    };
  }
  return [trace];
}

function pointText(point, label, role, value, ppl) {
  const se = point.se === null ? "" : ` ± ${significant(point.se, 2)}${ppl ? " (log)" : ""}`;
  return `<b>${plain(label)}</b>, ${ROLES[role]}<br>N ${grouped(point.n)}<br>D<sub>s</sub> ${orUnknown(point.short)}<br>D<sub>l</sub> ${grouped(point.long)}<br>observed ${shown(value(point.y), ppl)}${se}`;
}

const shown = (value, ppl) => (ppl ? significant(value, 4) : value.toFixed(4));
const percentText = (level) => `${Math.round(level * 100)} %`;

/**
 * The value axis of each panel. All have one length, so that slopes and distances compare; where panels lie far apart,
 * as those of different N do, each begins where its own values do.
 */
function valueRanges(panels, points, curves, value) {
  const spans = panels.map((panel) =>
    valueSpan(...[points, curves].map((list) => list.filter((item) => item.panel === panel.key)), value),
  );
  const all = valueSpan(points, curves, value);
  const widest = spans.reduce((length, [low, high]) => Math.max(length, high - low), 0);
  if (all[1] - all[0] <= ALIKE * widest) return { ranges: panels.map(() => all), shared: true };
  return { ranges: spans.map(([low, high]) => [(low + high - widest) / 2, (low + high + widest) / 2]), shared: false };
}

/** The span of values over points and lines; a band that is far wider is cut rather than flattening all else. */
function valueSpan(points, curves, value) {
  const logs = [
    ...points.map((point) => point.y),
    ...curves.flatMap((curve) => curve.at.map((point) => point.log_longppl)),
  ];
  if (logs.length === 0) return [0, 1];
  const [low, high] = [value(logs.reduce((a, b) => Math.min(a, b))), value(logs.reduce((a, b) => Math.max(a, b)))];
  const margin = 0.07 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

function longAxis(points, curves, width) {
  return countAxis(
    [
      ...points.map((point) => Number(point.long)),
      ...curves.flatMap((curve) => [curve.at[0].long_tokens, curve.at.at(-1).long_tokens]),
    ],
    width,
  );
}
