// Plotly, loaded when it is first needed, and what all charts of this page share: colours, ticks, a plain frame.

import { h, short } from "./page.js";

const NARROW = 600; // pixels; below, a finger scrolls the page rather than zooming a chart
let library = null;

/** Plotly itself, once its script is there. */
export function loadPlotly() {
  library ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "/static/plotly.min.js" });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      library = null;
      reject(new Error("The charts' script did not load; the tables below them hold the numbers."));
    };
    document.head.append(script);
  });
  return library;
}

/** Draws into `element`, in place of what it held before. */
export async function plot(element, traces, layout) {
  await (
    await loadPlotly()
  ).react(element, traces, layout, {
    displaylogo: false,
    displayModeBar: layout.width < NARROW ? false : "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  });
}

/** Calls `draw` whenever `element` has another width, or the page other colours. */
export function redrawn(element, draw) {
  let width = element.clientWidth;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    if (width > 0) draw();
  }).observe(element);
}

/** Colours of this page as it is shown now, light or dark. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    text: read("--text"),
    muted: read("--muted"),
    grid: read("--grid"),
    surface: read("--surface"),
    ramp: read("--ramp").split(" "),
    font: style.fontFamily,
  };
}

/** The colour of place `index` of `count` along a ramp of rising lightness, which every kind of sight can order. */
export function colour(index, count, ramp) {
  const at = count < 2 ? 0 : (index / (count - 1)) * (ramp.length - 1);
  const from = Math.min(Math.floor(at), ramp.length - 2);
  const channel = (text, place) => parseInt(text.slice(1 + 2 * place, 3 + 2 * place), 16);
  const mix = [0, 1, 2].map((place) => {
    const [a, b] = [channel(ramp[from], place), channel(ramp[from + 1], place)];
    return Math.round(a + (b - a) * (at - from));
  });
  return `#${mix.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

/** What every layout begins with. */
export function base(width, height, margin, colours) {
  return {
    width,
    height,
    margin,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: colours.font, size: 12, color: colours.text },
    hoverlabel: {
      bgcolor: colours.surface,
      bordercolor: colours.muted,
      font: { color: colours.text, family: colours.font },
      align: "left",
    },
    hovermode: "closest",
    dragmode: width < NARROW ? false : "zoom",
    showlegend: false,
  };
}

/** What every axis begins with. */
export const axis = (colours) => ({
  gridcolor: colours.grid,
  linecolor: colours.muted,
  zeroline: false,
  tickfont: { size: 11, color: colours.muted },
  tickcolor: colours.grid,
});

/** The layout of a chart of one panel; `x` and `y` are its axes, each with its `label`. */
export function frame({ width, height, x, y, colours }) {
  const titled = ({ label, ...rest }) => ({
    ...axis(colours),
    title: { text: label, standoff: 10, font: { size: 12, color: colours.muted } },
    ...rest,
  });
  return {
    ...base(width, height, { l: 66, r: 16, t: 12, b: 54 }, colours),
    xaxis: { showline: true, ...titled(x) },
    yaxis: { nticks: 7, ...titled(y) },
  };
}

/** A log axis of counts over `values`, which are above zero, with room at both ends. */
export function countAxis(values, width, ratio = 1.12) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity) / ratio;
  const high = values.reduce((a, b) => Math.max(a, b), 0) * ratio;
  const tickvals = ticks(low, high, Math.max(3, Math.floor(width / 60)));
  return { type: "log", range: [Math.log10(low), Math.log10(high)], tickvals, ticktext: tickvals.map(short) };
}

/** At most `most` round numbers between `low` and `high` for a log axis: 1-2-5 steps, else decades. */
function ticks(low, high, most) {
  for (const steps of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      found.push(...steps.map((step) => step * 10 ** power).filter((value) => value >= low && value <= high));
    }
    if (found.length <= most)
      return found.length > 1 || steps.length === 1 ? found : [low, high].map((value) => Number(value.toPrecision(2)));
  }
  return [];
}

/** Text as Plotly shows it: it reads a few tags, which names must not bring. */
export const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
