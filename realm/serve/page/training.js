// The view "Training": the curves and index refreshes of one run or two runs, which are updated while a run trains.

import { address, el, field, get } from "./dom.js";
import { chart, newCursor, number, stepsOf } from "./chart.js";
import { timeline } from "./timeline.js";

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
const STATES = { training: "training", stopped: "stopped before its end (killed or interrupted)", finished: "finished" };
let last = null; // name of the run that was shown last

export async function trainingView(main, health, [wanted], values) {
  main.append(el("h1", { class: "sr" }, "Training"));
  if (!health.runs) {
    main.append(el("p", {}, "No training runs are shown: start the server with ", el("code", {}, "--runs FOLDER"), "."));
    return;
  }
  let { runs } = await get("v1/runs");
  if (!runs.length) {
    const hint = el("p", { class: "hint" }, "There is no training run in this folder yet.");
    main.append(hint);
    while (!runs.length) {
      await new Promise((done) => setTimeout(done, EVERY));
      if (!main.isConnected) return;
      await list();
    }
    hint.remove();
  }
  const known = (name) => runs.find((run) => run.name === name)?.name;
  const first = (last = known(wanted) ?? known(last) ?? runs[0].name);
  const second = known(values.get("with"));
  const shown = [first, ...(second && second !== first ? [second] : [])].map((name) => ({ name, rows: [], state: "", next: 0, damaged: 0 }));
  const select = el("select", { onchange: go }, runs.map(option(first)));
  const other = el("select", { onchange: go }, el("option", { value: "" }, "no other run"), runs.filter((run) => run.name !== first).map(option(second)));
  const states = shown.map((_, r) => el("p", { class: `state run-${r}`, role: "status" }));
  const panels = el("div", { class: "panels" });
  main.append(el("div", { class: "line options" }, field("Run", select), field("Compare with", other), el("div", {}, states)), panels);
  const cursor = newCursor();
  let timer = null;
  let gone = false;
  await follow();
  return () => {
    gone = true;
    clearTimeout(timer);
  };

  // Reads the list of runs again. If the server cannot be reached, the list stays as it is.
  async function list() {
    await get("v1/runs").then((said) => { runs = said.runs; }, () => {});
  }

  function option(chosen) {
    return (run) => el("option", { value: run.name, selected: run.name === chosen }, label(run));
  }

  // Shows the new runs and states. The options stay where they are, because a person may be choosing one of them.
  function relabel() {
    for (const place of [select, other]) {
      for (const run of runs) {
        const known = [...place.options].find((one) => one.value === run.name);
        if (!known && run.name !== first) place.append(option(null)(run));
        else if (known && known.text !== label(run)) known.textContent = label(run);
      }
    }
  }

  function go() {
    const to = `training/${encodeURIComponent(select.value)}`;
    location.hash = other.value && other.value !== select.value ? address(to, { with: other.value }) : `#${to}`;
  }

  async function follow() {
    const [changed] = await Promise.all([Promise.all(shown.map((run, r) => read(run, states[r]))), list()]);
    if (gone) return;
    relabel();
    if (changed.some(Boolean) || !panels.childElementCount) draw();
    timer = setTimeout(follow, EVERY);
  }

  // Reads the new lines of a run, and shows its state -> whether the curves have changed.
  async function read(run, place) {
    let changed = false;
    try {
      let more = true;
      while (more && !gone) {
        const said = await get(`v1/runs/${encodeURIComponent(run.name)}?after=${run.next}`);
        if (said.next < run.next) Object.assign(run, { rows: [], damaged: 0 }); // the run was started again
        more = said.next !== run.next;
        changed ||= more || run.state !== said.state;
        Object.assign(run, { state: said.state, next: said.next, damaged: run.damaged + said.damaged });
        run.rows.push(...said.rows);
      }
      const seen = run.rows.at(-1);
      place.replaceChildren(el("span", { class: `dot ${run.state}` }), el("span", {}, ...(shown.length > 1 ? [el("b", {}, run.name), ": "] : []), STATES[run.state],
        seen ? `, step ${number(seen.step)}, ${duration(seen.seconds)}` : "", run.damaged ? `; ${run.damaged} damaged ${run.damaged === 1 ? "line is" : "lines are"} left out` : ""));
    } catch (error) {
      place.replaceChildren(error.message);
    }
    return changed;
  }

  function draw() {
    const focused = document.activeElement?.closest(".chart")?.dataset.title;
    const opened = new Set([...panels.querySelectorAll("details[open]")].map((one) => one.closest(".chart").dataset.title));
    const steps = stepsOf(shown);
    const strips = shown.map((run) => timeline(run, shown.length > 1, steps, cursor)).filter((one) => one !== null);
    const curves = PANELS.map((panel) => chart(panel, shown, steps, shown.length === 1 && strips.length ? strips[0].swaps : [], cursor)).filter((one) => one !== null);
    const at = cursor.step;
    cursor.charts = [];
    panels.replaceChildren(...[...curves, ...strips].map((one) => one.element));
    if (!curves.length) panels.prepend(el("p", { class: "hint" }, shown.length > 1 ? "The runs have no metrics yet." : "The run has no metrics yet."));
    cursor.charts = [...curves, ...strips];
    for (const one of panels.querySelectorAll(".chart")) { // the focus, the cursor and open tables stay
      if (one.dataset.title === focused) one.querySelector("svg").focus({ preventScroll: true });
      if (opened.has(one.dataset.title)) one.querySelector("details").open = true;
    }
    cursor.move(at);
  }
}

function label(run) {
  return run.name + (run.state === "finished" ? "" : ` (${run.state})`);
}

function duration(seconds) {
  if (!(seconds >= 0)) return "";
  const minutes = Math.floor(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${seconds.toFixed(0)} s`;
}
