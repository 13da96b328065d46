// The view "Training": the curves of a training run, which are updated while the run trains.

import { el, field, get, problem } from "./dom.js";
import { chart, number } from "./chart.js";

const EVERY = 2000; // milliseconds
const RANKS = [1, 5, 20];
const PANELS = [
  { title: "Loss", unit: "nats per masked wordpiece", keys: { loss: "" } },
  { title: "Retrieval utility", unit: "nats more than without a passage", keys: { retrieval_utility: "" } },
  { title: "Null passage, p(z|x)", unit: "probability", keys: { null_probability: "" }, floor: 0 },
  { title: "Masked facts found", unit: "% in the top k", keys: Object.fromEntries(RANKS.map((k) => [`probe_recall_${k}`, `@${k}`])), points: true },
  { title: "Questions found", unit: "% in the top k", keys: Object.fromEntries(RANKS.map((k) => [`question_recall_${k}`, `@${k}`])), points: true },
  { title: "Index age", unit: "steps", keys: { index_age: "" }, floor: 0 },
  { title: "Candidate freshness", unit: "share of the top 20 that is new in an index", keys: { churn: "" }, floor: 0, points: true },
  { title: "Gap of positives in the reader", unit: "nats", keys: { positive_gap: "" }, points: true },
  { title: "Dev exact match", unit: "%", keys: { dev_em: "" }, points: true },
];
const STATES = { training: "training", stopped: "stopped before its end", finished: "finished" };
let chosen = null;

export async function trainingView(main, health, [wanted]) {
  main.append(el("h1", { class: "sr" }, "Training"));
  if (!health.runs) {
    main.append(el("p", {}, "No training runs are shown: start the server with ", el("code", {}, "--runs FOLDER"), "."));
    return;
  }
  const select = el("select", { onchange: () => { location.hash = `#training/${encodeURIComponent(select.value)}`; } });
  const state = el("p", { class: "state", role: "status" });
  const panels = el("div", { class: "panels" });
  main.append(el("div", { class: "line options" }, field("Run", select), state), panels);
  const { runs } = await get("v1/runs");
  if (!runs.length) {
    panels.replaceChildren(el("p", { class: "hint" }, "There is no training run in this folder yet."));
    return;
  }
  chosen = runs.find((run) => run.name === wanted)?.name ?? runs.find((run) => run.name === chosen)?.name ?? runs[0].name;
  select.append(...runs.map((run) => el("option", { value: run.name, selected: run.name === chosen }, run.name + (run.state === "finished" ? "" : ` (${run.state})`))));

  let rows = [];
  let next = 0;
  let damaged = 0;
  let timer = null;
  let gone = false;
  await follow();
  return () => {
    gone = true;
    clearTimeout(timer);
  };

  async function follow() {
    try {
      let more = true;
      let now = "";
      while (more && !gone) {
        const said = await get(`v1/runs/${encodeURIComponent(chosen)}?after=${next}`);
        if (said.next < next) [rows, damaged] = [[], 0]; // the run was started again
        more = said.next !== next;
        now = said.state;
        damaged += said.damaged;
        rows.push(...said.rows);
        if (more || !panels.childElementCount) draw();
        next = said.next;
      }
      const seen = rows.at(-1);
      state.replaceChildren(el("span", { class: `dot ${now}` }), STATES[now], seen ? `, step ${number(seen.step)}, ${duration(seen.seconds)}` : "", damaged ? `; ${damaged} damaged ${damaged === 1 ? "line is" : "lines are"} left out` : "");
    } catch (error) {
      state.replaceChildren(error.message);
    }
    if (!gone) timer = setTimeout(follow, EVERY);
  }

  function draw() {
    const shown = PANELS.map((panel) => chart(panel, rows)).filter((one) => one !== null);
    panels.replaceChildren(...(shown.length ? shown : [el("p", { class: "hint" }, "The run has no metrics yet.")]));
  }
}

function duration(seconds) {
  if (!(seconds >= 0)) return "";
  const minutes = Math.floor(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${seconds.toFixed(0)} s`;
}
