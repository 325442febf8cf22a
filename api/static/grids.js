// Which grids there are, and how far the chosen one is.

import { ask } from "./service.js";
import { byId, clock, duration, grouped, h, keyed, percent, rebuild, setText, significant, time } from "./page.js";
import { verbsView } from "./verbs.js";

const PAGE = 8;
const OPEN = new Set(["PENDING", "RUNNING"]);
const SHOWN = 12;
const PROTOCOLS = { constant: "constant rate", linear_decay: "linear decay" };
/** What segments are called where a person reads it. */
export const STAGES = {
  short_trunk: "short stage, trunk",
  short_decay: "short stage, decay",
  long_constant: "long stage",
  long_linear_decay: "long stage, linear decay",
  follow_up: "follow-up stage",
};

/**
 * The list of grids and the progress of the chosen one.
 *
 * `chosen(detail)` is called whenever another grid is chosen, by a person or for want of a choice.
 */
export function gridsView(initialId, chosen) {
  let gridId = initialId;
  let told = null;
  let shown = null;
  let page = null;
  const cursors = [null]; // of the pages up to the one shown
  const verbs = verbsView((grid) => grid.id === gridId && drawGrid(grid));
  const highest = new Map(); // tokens seen done, per grid and scale: a resumed attempt does not take a bar back

  byId("newer").addEventListener("click", () => turn(() => cursors.length > 1 && cursors.pop()));
  byId("older").addEventListener("click", () => turn(() => page?.next_cursor && cursors.push(page.next_cursor)));

  async function turn(change) {
    change();
    await refreshList();
  }

  async function refreshList() {
    const cursor = cursors.at(-1);
    const asked = await ask(
      `/v1/grids?limit=${PAGE}` + (cursor === null ? "" : `&cursor=${encodeURIComponent(cursor)}`),
    );
    if (cursor !== cursors.at(-1)) return;
    page = asked;
    byId("no-grids").hidden = page.items.length > 0 || cursors.length > 1;
    byId("grid-pages").hidden = page.next_cursor === null && cursors.length === 1;
    byId("newer").disabled = cursors.length === 1;
    byId("older").disabled = page.next_cursor === null;
    gridId ??= page.items[0]?.id ?? null;
    drawList();
  }

  function drawList() {
    keyed(
      byId("grid-list"),
      page.items,
      (grid) => grid.id,
      makeEntry,
      (entry, grid) => {
        const button = entry.firstElementChild;
        button.setAttribute("aria-current", String(grid.id === gridId));
        setPill(button.querySelector(".pill"), grid);
      },
    );
  }

  function makeEntry(grid) {
    const button = h(
      "button",
      { type: "button" },
      h("span", { class: "name" }, grid.name),
      h("span", { class: "small" }, time(grid.created_at)),
      h("span", { class: "pill" }),
    );
    button.addEventListener("click", () => {
      gridId = grid.id;
      drawList();
      refreshGrid();
    });
    return h("li", {}, button);
  }

  async function refreshGrid() {
    const asked = gridId;
    byId("grid").hidden = asked === null;
    if (asked === null) return;
    let grid;
    try {
      grid = await ask(`/v1/grids/${encodeURIComponent(asked)}`);
    } catch (error) {
      if (error.problem?.status !== 404) throw error;
      gridId = page?.items[0]?.id ?? null; // an address that names a grid of another database
      return;
    }
    if (asked !== gridId) return;
    drawGrid(grid);
    shown = grid;
    if (told !== gridId) {
      told = gridId;
      chosen(grid);
    }
  }

  function drawGrid(grid) {
    setText(byId("grid-name"), grid.name);
    setPill(byId("grid-state"), grid);
    verbs.draw(grid);
    rebuild(byId("grid-facts"), [grid.id], () => facts(grid));

    const done = neverLess(`${grid.id}`, grid.tokens_done, grid.tokens_total);
    setText(byId("tile-share"), percent(share(done, grid.tokens_total)));
    setText(byId("tile-tokens"), `${grouped(done)} of ${grouped(grid.tokens_total)}`);
    const cells = Object.values(grid.cells).reduce((sum, count) => sum + count, 0);
    setText(byId("tile-cells"), `${grouped(grid.cells.MEASURED)} of ${grouped(cells)}`);
    const rest = ["RUNNING", "PENDING", "FAILED", "CANCELLED"].filter((state) => grid.cells[state]);
    setText(
      byId("tile-cells-rest"),
      rest.map((state) => `${grouped(grid.cells[state])} ${state.toLowerCase()}`).join(", ") || "all of them",
    );
    setText(byId("tile-rate"), grid.tokens_per_s ? grouped(Math.round(grid.tokens_per_s)) : "–");
    const [left, note] = timeLeft(grid);
    setText(byId("tile-eta"), left);
    setText(byId("tile-eta-note"), note);

    keyed(
      byId("scale-rows"),
      grid.scales,
      (scale) => scale.scale,
      makeScale,
      (row, scale) => drawScale(row, grid, scale),
    );
    byId("attempts").hidden = grid.attempts.length === 0;
    rebuild(byId("attempt-rows"), [grid.attempts, clock()], () => grid.attempts.map(attemptRow));
    drawReasons(
      "waiting",
      grid.waiting.map((item) => ({ ...item, text: item.why })),
    );
    drawReasons(
      "failures",
      grid.failures.map((item) => ({ ...item, text: item.reason })),
    );
  }

  function neverLess(key, done, total) {
    const seen = highest.get(key);
    const shown = seen !== undefined && seen > done ? seen : done;
    highest.set(key, shown > total ? total : shown);
    return highest.get(key);
  }

  function makeScale(scale) {
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, scale.scale),
      h(
        "td",
        { class: "bar" },
        h("progress", { max: "1", value: "0", "aria-label": `Tokens of ${scale.scale}` }),
        h("span", { class: "share" }),
      ),
      h("td", { class: "number done" }),
      h("td", { class: "number total" }),
      h("td", { class: "number rate" }),
      h("td", { class: "number evaluations" }),
    );
  }

  function drawScale(row, grid, scale) {
    const done = neverLess(`${grid.id} ${scale.scale}`, scale.tokens_done, scale.tokens_total);
    const part = share(done, scale.tokens_total);
    row.querySelector("progress").value = part;
    setText(row.querySelector(".share"), percent(part));
    setText(row.querySelector(".done"), grouped(done));
    setText(row.querySelector(".total"), grouped(scale.tokens_total));
    setText(row.querySelector(".rate"), scale.tokens_per_s ? grouped(Math.round(scale.tokens_per_s)) : "–");
    const all = Object.values(scale.evaluations).reduce((sum, count) => sum + count, 0);
    setText(row.querySelector(".evaluations"), `${grouped(scale.evaluations.SUCCEEDED)} / ${grouped(all)}`);
  }

  return {
    refresh: async () => {
      await refreshList();
      await refreshGrid();
    },
    /** Whether anything that is shown may change soon. */
    isActive: () =>
      (page?.items ?? []).some((grid) => OPEN.has(grid.state)) || OPEN.has(byId("grid-state").dataset.state),
    chosenId: () => gridId,
    /** Details of the chosen grid, as last asked; null where there is none. */
    shown: () => shown,
  };
}

function facts(grid) {
  const saved = Number(grid.tokens_independent) / Math.max(Number(grid.tokens_train), 1);
  const parts = [
    h("span", {}, "Submitted ", time(grid.created_at)),
    h("span", {}, PROTOCOLS[grid.protocol] ?? grid.protocol),
    h("span", {}, h("b", {}, grouped(grid.tokens_train)), " tokens to train"),
    Number(grid.tokens_train) > 0 && saved > 1.005
      ? h("span", {}, `${significant(saved, 3)}× fewer than without sharing`)
      : null,
    h("span", {}, `${grid.flops ? grid.flops.toExponential(1).replace("e+", "e") : 0} FLOPs`),
    h(
      "span",
      {},
      `${grid.gpu_hours > 0 && grid.gpu_hours < 0.001 ? "below 0.001" : significant(grid.gpu_hours, 2)} GPU-hours planned`,
    ),
    grid.holdout ? h("span", {}, `holds out ${grid.holdout}`) : null,
  ];
  return parts.filter(Boolean);
}

function timeLeft(grid) {
  if (grid.paused_at !== null) return ["–", "paused"];
  if (!OPEN.has(grid.state)) return ["–", `ended ${grid.state.toLowerCase()}`];
  return grid.eta_s === null ? ["unknown", "until every scale trains"] : [duration(grid.eta_s), "at the present speed"];
}

function setPill(pill, grid) {
  const paused = grid.paused_at !== null;
  setText(pill, paused ? "paused" : grid.state.toLowerCase());
  pill.dataset.state = grid.state;
  pill.classList.toggle("paused", paused);
}

const share = (done, total) => (Number(total) ? Number(done) / Number(total) : 1);

function attemptRow(attempt) {
  const what = attempt.kind === "EVALUATION" ? `evaluation, ${attempt.what}` : (STAGES[attempt.what] ?? attempt.what);
  const step =
    attempt.step === null
      ? "–"
      : grouped(attempt.step) + (attempt.target_step === null ? "" : ` / ${grouped(attempt.target_step)}`);
  const since_s = Math.max(0, (Date.now() - new Date(attempt.started_at)) / 1000);
  return h(
    "tr",
    {},
    h("td", {}, what),
    h("td", {}, attempt.scale),
    h("td", { class: "number" }, step),
    h("td", { class: "number" }, attempt.loss === null ? "–" : attempt.loss.toFixed(3)),
    h("td", { class: "number" }, attempt.tokens_per_s === null ? "–" : grouped(Math.round(attempt.tokens_per_s))),
    h("td", {}, attempt.worker),
    h("td", { class: "number" }, String(attempt.number)),
    h("td", { class: "number" }, duration(since_s)),
  );
}

function drawReasons(id, items) {
  byId(id).hidden = items.length === 0;
  rebuild(byId(id === "waiting" ? "waiting-rows" : "failure-rows"), items, () => {
    const rows = items.slice(0, SHOWN).map((item) => {
      const kind = item.kind.toLowerCase() + (item.count === 1 ? "" : "s");
      return h(
        "li",
        {},
        h("b", {}, item.scale),
        h("span", { class: "count" }, `${grouped(item.count)} ${kind}`),
        h("span", {}, item.text),
      );
    });
    if (items.length > SHOWN) rows.push(h("li", {}, `and ${items.length - SHOWN} more reasons`));
    return rows;
  });
}
