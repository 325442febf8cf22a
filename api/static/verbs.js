// Buttons that tell the chosen grid what to do, each behind a dialog that says what would come of it.

import { byId, grouped, h, setText } from "./page.js";
import { ask, isAnswer } from "./service.js";

/** What the service calls a verb, and how the dialog puts it; `did` is said of the work that it is about. */
const VERBS = {
  pause: {
    title: "Pause this grid?",
    about: "Nothing more begins for it. Training ends at its next checkpoint, evaluations that run are finished.",
    did: "waits",
    yes: "Pause",
    no: "Let it run",
  },
  resume: {
    title: "Let this grid go on?",
    about: "Training goes on from the newest checkpoints.",
    did: "goes on",
    yes: "Resume",
    no: "Leave it paused",
  },
  "retry-failed": {
    title: "Try again what failed?",
    about: "What failed is opened again, with new retry budgets, from the newest checkpoints.",
    did: "is opened again",
    yes: "Try again",
    no: "Leave it failed",
  },
  cancel: {
    title: "Cancel this grid?",
    about: "It stops for good. The same grid, submitted again, goes on from its checkpoints.",
    did: "stops",
    yes: "Cancel the grid",
    no: "Keep it",
  },
};

/** `changed(detail)` gets the grid as it stands after a verb. */
export function verbsView(changed) {
  const dialog = byId("verb-dialog");
  let grid = null;
  let asked = null; // the grid and the verb that the dialog is about
  for (const verb of Object.keys(VERBS)) byId(`verb-${verb}`).addEventListener("click", () => propose(verb));
  byId("verb-yes").addEventListener("click", obey);
  byId("verb-no").addEventListener("click", () => dialog.close());

  async function propose(verb) {
    asked = { grid, verb };
    const words = VERBS[verb];
    setText(byId("verb-title"), words.title);
    setText(byId("verb-grid"), grid.name);
    setText(byId("verb-about"), words.about);
    setText(byId("verb-yes"), words.yes);
    setText(byId("verb-no"), words.no);
    byId("verb-yes").disabled = true;
    setText(byId("verb-error"), "");
    byId("verb-effects").replaceChildren();
    dialog.showModal();
    byId("verb-no").focus();
    const preview = await tell(asked, "?preview=true");
    if (preview === null) return;
    byId("verb-effects").replaceChildren(...effects(preview));
    byId("verb-yes").disabled = false;
  }

  async function obey() {
    byId("verb-yes").disabled = true;
    const done = await tell(asked, "");
    if (done === null) return;
    dialog.close();
    changed(done);
  }

  /** The service's answer; null where it refuses, which the dialog then says. */
  async function tell(what, query) {
    try {
      return await ask(`/v1/grids/${encodeURIComponent(what.grid.id)}:${what.verb}${query}`, {});
    } catch (error) {
      if (!isAnswer(error)) throw error;
      setText(byId("verb-error"), error.message);
      return null;
    }
  }

  return {
    /** Offers what the state of `detail` allows. */
    draw: (detail) => {
      grid = detail;
      const paused = detail.paused_at !== null;
      byId("verb-pause").hidden = paused;
      byId("verb-resume").hidden = !paused;
      for (const verb of Object.keys(VERBS)) byId(`verb-${verb}`).disabled = !detail.verbs.includes(verb);
    },
  };
}

function effects(grid) {
  const done = grid.obeyed;
  const rows = [[VERBS[done.verb].did, work(done.segments, done.evaluations)]];
  if (Number(done.attempts)) rows.push(["runs now", some(done.attempts, "attempt")]);
  if (Number(done.segments_kept) || Number(done.evaluations_kept)) {
    rows.push(["goes on for other grids", work(done.segments_kept, done.evaluations_kept)]);
  }
  if (done.verb === "cancel") {
    const cells = Object.values(grid.cells).reduce((sum, count) => sum + count, 0);
    rows.push(["is saved", `${grouped(done.tokens_saved)} tokens of training`]);
    rows.push(["stays", `${grouped(done.cells_measured)} of ${grouped(cells)} cells measured, and all checkpoints`]);
  }
  return rows.flatMap(([what, text]) => [h("dt", {}, what), h("dd", {}, text)]);
}

const work = (segments, evaluations) => `${some(segments, "segment")}, ${some(evaluations, "evaluation")}`;
const some = (count, what) => `${grouped(count)} ${what}${Number(count) === 1 ? "" : "s"}`;
