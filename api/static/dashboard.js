// The first page: asks the REST API again and again while someone looks, and says so when it cannot.

import { gridsView } from "./grids.js";
import { lawView } from "./law.js";
import { byId, clock, setText } from "./page.js";
import { predictView } from "./predict.js";
import { probesView } from "./probes.js";
import { ProblemError, isAnswer } from "./service.js";
import { trainingView } from "./training.js";

const ACTIVE_MS = 1_500;
const IDLE_MS = 6_000;
const LAW_EVERY = 3; // results come more slowly than progress

const asked = new URLSearchParams(location.hash.slice(1));
const predict = predictView(() => law.level());
const law = lawView({ series: asked.get("series"), fit: asked.get("fit") }, predict.use);
const ofGrid = [trainingView(), probesView()];
const grids = gridsView(asked.get("grid"), (grid) => {
  law.follow(grid);
  for (const view of ofGrid) view.attempt(grid);
});

let timer = null;
let asking = false;
let rounds = 0;
let lostSince = null;

async function round() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  try {
    await grids.refresh();
    if (rounds++ % LAW_EVERY === 0 || law.isBusy() || !isActive()) {
      await law.refresh();
      for (const view of ofGrid) await view.follow(grids.shown());
    }
    lostSince = null;
    byId("outage").hidden = true;
    setText(byId("connection"), `Live · updated ${clock()}`);
  } catch (error) {
    lost(error);
  }
  document.body.classList.toggle("stale", lostSince !== null);
  remember();
  asking = false;
  timer = setTimeout(round, lostSince === null && isActive() ? ACTIVE_MS : IDLE_MS);
}

function lost(error) {
  lostSince ??= clock();
  if (!isAnswer(error)) console.error(error);
  const what =
    error instanceof ProblemError
      ? `The service answers with an error: ${error.message}`
      : isAnswer(error)
        ? "The service does not answer"
        : `This page has a fault: ${error.message}`;
  setText(
    byId("outage"),
    `${what}. What you see is from before ${lostSince}; trying again every few seconds. Running training is not affected.`,
  );
  byId("outage").hidden = false;
  setText(byId("connection"), `Not live since ${lostSince}`);
}

const isActive = () => grids.isActive() || law.isBusy();

/** Keeps what is chosen in the address, so that it can be reloaded and passed on. */
function remember() {
  const chosen = { grid: grids.chosenId(), ...law.chosen() };
  const given = Object.entries(chosen).filter(([, value]) => value);
  const hash = `#${new URLSearchParams(given)}`;
  if (given.length > 0 && location.hash !== hash) history.replaceState(null, "", hash);
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) setText(byId("connection"), "Paused while hidden");
  round();
});
window.addEventListener("online", round);

round();
