// The refreshes of the index during a run as a strip over the steps: snapshot, build, wait for the swap, and the version in use.

import { el, svg } from "./dom.js";
import { cross, figure, number, plane } from "./chart.js";

const WIDE = 1080;
const NARROW = 360; // on a phone, where the text would be too small otherwise
const HEIGHT = 78;
const LEFT = 52;
const BUILD = 8; // top of the lane of builds
const USE = 32; // top of the lane of the versions in use
const LANE = 18;

// The index versions of a run, as the metrics describe them. `built` is the step at which the build ended, and `end` the step at
// which the next version replaced this version. A version that the health checks refused is never in use.
export function refreshes(rows) {
  const clock = rows.filter((row) => Number.isFinite(row.step) && Number.isFinite(row.seconds));
  const versions = rows.filter((row) => Number.isFinite(row.index_number) && Number.isFinite(row.index_step)).map((row) => ({
    number: row.index_number, snapshot: row.index_step, used: row.step, build: row.build_seconds, swap: row.swap_seconds,
    built: Number.isFinite(row.build_seconds) ? stepAt(clock, secondsAt(clock, row.index_step) + row.build_seconds, row.index_step, row.step) : row.step,
  }));
  let current = null;
  for (const [n, one] of versions.entries()) {
    one.refused = current !== null && isRefused(rows, one, current, versions[n + 1]?.used ?? Infinity);
    if (one.refused) continue;
    if (current) current.end = one.used;
    current = one;
  }
  return versions;
}

// The index age in the lines after the swap shows which of two versions is in use. The age is a mean over the steps of a line.
function isRefused(rows, built, current, until) {
  const aged = rows.filter((row) => row.step > built.used && row.step <= until && Number.isFinite(row.index_age));
  if (aged.length < 2) return false;
  const snapshot = (aged[0].step + aged[1].step - 1) / 2 - aged[1].index_age;
  return Math.abs(snapshot - current.snapshot) < Math.abs(snapshot - built.snapshot);
}

function secondsAt(clock, step) {
  const after = clock.findIndex((row) => row.step >= step);
  if (after < 0) return clock.at(-1)?.seconds ?? NaN;
  const [a, b] = [clock[Math.max(0, after - 1)], clock[after]];
  return b.step > a.step ? a.seconds + ((step - a.step) / (b.step - a.step)) * (b.seconds - a.seconds) : b.seconds;
}

function stepAt(clock, seconds, from, to) {
  const after = clock.findIndex((row) => row.seconds >= seconds);
  if (after < 0) return to;
  const [a, b] = [clock[Math.max(0, after - 1)], clock[after]];
  const step = b.seconds > a.seconds ? a.step + ((seconds - a.seconds) / (b.seconds - a.seconds)) * (b.step - a.step) : b.step;
  return Math.min(to, Math.max(from, step));
}

// The first and the last step of a build that has no version yet; null if no build runs.
function unfinished(rows) {
  const begin = rows.findLastIndex((row) => Number.isFinite(row.index_number));
  const logged = rows.slice(begin + 1).filter((row) => Number.isFinite(row.building));
  const first = logged.findIndex((row) => row.building > 0);
  if (first < 0 || !(logged.at(-1).building > 0)) return null;
  return [logged[first - 1]?.step ?? rows[begin]?.step ?? logged[first].step, logged.at(-1).step];
}

// The strip of a run; null if the run has no index versions.
export function timeline(run, named, steps, cursor) {
  const versions = refreshes(run.rows);
  if (!versions.length) return null;
  const last = run.rows.findLast((row) => Number.isFinite(row.step)).step;
  const title = named ? `Index refreshes of ${run.name}` : "Index refreshes";
  const newest = described(versions.at(-1));
  const label = `${title}: ${versions.length} ${versions.length === 1 ? "version" : "versions"}, newest ${newest}. The table below has all versions.`;
  const width = matchMedia("(max-width: 40rem)").matches ? NARROW : WIDE;
  const { picture, x, point } = plane({ width, height: HEIGHT, left: LEFT, top: BUILD, bottom: 20, label, steps, cursor });
  const box = (kind, y, from, to) => picture.append(svg("rect", { class: kind, x: x(from), y, width: Math.max(1, x(to) - x(from)), height: LANE }));
  for (const [text, y] of [["build", BUILD], ["in use", USE]]) picture.append(svg("text", { class: "tick", x: LEFT - 6, y: y + 12.5, "text-anchor": "end" }, text));
  let shade = 0;
  for (const one of versions) {
    box("building", BUILD, one.snapshot, one.built);
    if (one.used > one.built) box("waiting", BUILD, one.built, one.used);
    picture.append(svg("line", { class: "snapshot", x1: x(one.snapshot), x2: x(one.snapshot), y1: BUILD - 3, y2: BUILD + LANE }));
    if (one.refused) {
      picture.append(cross(x(one.used), BUILD + LANE / 2));
      continue;
    }
    const end = one.end ?? last;
    box(`using shade-${(shade += 1) % 2}`, USE, one.used, end);
    picture.append(svg("line", { class: "swap", x1: x(one.used), x2: x(one.used), y1: BUILD, y2: USE + LANE }));
    if (x(end) - x(one.used) > 18) picture.append(svg("text", { class: "tick inside", x: x(one.used) + 4, y: USE + 13 }, String(one.number)));
  }
  const open = unfinished(run.rows);
  if (open) box("building open", BUILD, ...open);
  if (run.state === "stopped") picture.append(cross(x(last), (open ? BUILD : USE) + LANE / 2));
  const key = [["snapshot", "snapshot"], ["building", "build"], ["waiting", "ready, waits for the swap"], ["using", "version in use"]];
  const { element, say } = figure("strip", title, "steps of training", newest, picture,
    el("span", { class: "legend" }, key.map(([kind, text]) => el("span", { class: `mark ${kind}` }, text))), table(versions));
  return { element, show, swaps: versions.filter((one) => !one.refused).map((one) => one.used) };

  function show(step) {
    point(step);
    if (step === null) return say(null);
    const used = versions.findLast((one) => !one.refused && one.used <= step);
    const built = versions.find((one) => one.snapshot < step && step < one.used);
    const now = [used ? `version ${used.number}, ${number(Math.round(step) - used.snapshot)} steps old` : "no version"];
    if (built || (open && open[0] < step)) now.push(built && step > built.built ? `version ${built.number} waits` : "a build runs");
    say(`${now.join("; ")} at ${number(Math.round(step))}`);
  }
}

function described(one) {
  return `version ${one.number}: snapshot of step ${number(one.snapshot)}, ${one.refused ? `refused at step ${number(one.used)}` : `in use from step ${number(one.used)}`}`;
}

function table(versions) {
  const columns = ["Version", "Snapshot of step", "Build, s", "Swap, s", "In use from step"];
  return el("details", { class: "explain" }, el("summary", {}, "All versions"), el("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": "All versions" }, el("table", {},
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, versions.map((one) => el("tr", {},
      [one.number, one.snapshot, one.build, one.swap].map((value) => el("td", {}, number(value))), el("td", {}, one.refused ? "refused" : number(one.used))))))));
}
