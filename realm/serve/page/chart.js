// Small charts in SVG over the steps of one run or two runs. All charts of a view share the steps of their axis and a cursor, which
// the pointer and the arrow keys move; beside the title of a chart are the values at the cursor, or the newest values.

import { el, svg } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 170;
const LEFT = 44;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;
const MOVES = { ArrowLeft: -0.02, ArrowRight: 0.02, PageDown: -0.2, PageUp: 0.2, Home: -Infinity, End: Infinity };

// The first and the last step of runs `{name, state, rows}`, as the axis of all their charts.
export function stepsOf(runs) {
  const [first, last] = runs.map(({ rows }) => extent(rows.map((row) => row.step).filter(Number.isFinite)))
    .reduce(([a, b], [c, d]) => [Math.min(a, c), Math.max(b, d)], [Infinity, -Infinity]);
  return first <= last ? wide([first, last]) : [0, 1];
}

// A cursor that moves in all `charts` at once. `step` is null if no chart has the cursor.
export function newCursor() {
  const cursor = { step: null, charts: [], move };
  return cursor;

  function move(step) {
    cursor.step = step;
    for (const chart of cursor.charts) chart.show(step);
  }
}

// An empty picture with a scale over the steps and a rule at the cursor.
export function plane({ width, height, left, top, bottom, label, steps: [x0, x1], cursor }) {
  const inner = width - left - RIGHT;
  const x = (step) => left + ((step - x0) / (x1 - x0)) * inner;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": label });
  const rule = svg("line", { class: "rule", y1: top, y2: height - bottom, visibility: "hidden" });
  for (const [value, anchor] of [[x0, "start"], [x1, "end"]]) {
    picture.append(svg("text", { class: "tick", x: x(value), y: height - 7, "text-anchor": anchor }, anchor === "end" ? `step ${number(value)}` : number(value)));
  }
  const inside = (step) => Math.min(x1, Math.max(x0, step));
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    cursor.move(inside(x0 + ((((event.clientX - box.left) / box.width) * width - left) / inner) * (x1 - x0)));
  });
  picture.addEventListener("pointerleave", () => cursor.move(null));
  picture.addEventListener("blur", () => cursor.move(null));
  picture.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cursor.move(null);
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    cursor.move(inside((cursor.step ?? x1) + MOVES[event.key] * (x1 - x0)));
  });
  return { picture, x, point };

  function point(step) {
    if (step === null) return rule.setAttribute("visibility", "hidden");
    rule.setAttribute("x1", x(step));
    rule.setAttribute("x2", x(step));
    rule.setAttribute("visibility", "visible");
    if (!rule.isConnected || picture.lastChild !== rule) picture.append(rule);
  }
}

// A figure with a title, values beside the title, and a picture. Screen readers read the values aloud while the picture has the focus.
export function figure(kind, title, unit, newest, picture, ...below) {
  const reading = el("span", { class: "reading" }, newest);
  picture.addEventListener("focus", () => reading.setAttribute("aria-live", "polite"));
  picture.addEventListener("blur", () => reading.removeAttribute("aria-live"));
  const element = el("figure", { class: `chart ${kind}`, "data-title": title }, el("figcaption", {}, el("b", {}, title), reading, el("small", {}, unit)), picture, ...below);
  return { element, say: (text) => { reading.textContent = text ?? newest; } };
}

export function number(value) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 0.001) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

// `panel` is {title, unit, keys: {name: label}, floor?, points?}, and `swaps` has the steps at which an index was replaced. The
// result is null if no row has one of the keys.
export function chart(panel, runs, steps, swaps, cursor) {
  const keys = Object.entries(panel.keys);
  const series = runs.flatMap((run, r) => keys.map(([key, label], k) => ({
    label, run, r, colour: keys.length > 1 ? k : r,
    dots: run.rows.filter((row) => Number.isFinite(row[key]) && Number.isFinite(row.step)).map((row) => [row.step, row[key]]),
  }))).filter((one) => one.dots.length);
  if (!series.length) return null;
  let [y0, y1] = extent(series.flatMap((one) => one.dots).map(([, y]) => y));
  if (panel.floor !== undefined) y0 = Math.min(panel.floor, y0);
  [y0, y1] = wide([y0, y1]);
  const newest = values((one) => one.dots.at(-1));
  const label = `${panel.title}, ${panel.unit}, over steps ${number(steps[0])} to ${number(steps[1])}; newest ${newest}`;
  const { picture, x, point } = plane({ width: WIDTH, height: HEIGHT, left: LEFT, top: TOP, bottom: BOTTOM, label, steps, cursor });
  const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  for (const value of ticks(y0, y1)) {
    picture.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, number(value)),
    );
  }
  for (const step of swaps) picture.append(svg("line", { class: "swap", x1: x(step), x2: x(step), y1: HEIGHT - BOTTOM - 5, y2: HEIGHT - BOTTOM }));
  for (const one of series) {
    const dots = thinned(one.dots);
    const kind = `of-${one.colour} run-${one.r}`;
    picture.append(svg("path", { class: `line ${kind}`, d: dots.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("") }));
    if (panel.points || dots.length === 1) for (const [a, b] of dots) picture.append(svg("circle", { class: `point ${kind}`, cx: x(a), cy: y(b), r: 2.6 }));
    if (one.run.state === "stopped") picture.append(cross(x(one.dots.at(-1)[0]), y(one.dots.at(-1)[1])));
  }
  const legend = keys.length > 1 ? el("span", { class: "legend" }, keys.map(([, text], k) => el("span", { class: `key of-${k}` }, text))) : null;
  const { element, say } = figure("", panel.title, panel.unit, newest, picture, legend);
  return { element, show };

  // The values of all lines, with those of the second run after "vs".
  function values(dotOf) {
    return runs.map((run, r) => series.filter((one) => one.r === r).map((one) => `${one.label ? `${one.label} ` : ""}${number(dotOf(one)[1])}`).join(", ") || "none").join(" vs ");
  }

  function show(step) {
    if (step === null) {
      point(null);
      return say(null);
    }
    const near = (one) => one.dots.reduce((best, dot) => (Math.abs(dot[0] - step) < Math.abs(best[0] - step) ? dot : best));
    const place = near(series[0])[0];
    point(place);
    say(`${values(near)} at ${number(place)}`);
  }
}

// The mark at the end of a run that was killed or interrupted.
export function cross(x, y) {
  return svg("path", { class: "ended", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` });
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function wide([low, high]) {
  if (high > low) return [low, high];
  return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
}

function ticks(low, high) {
  const rough = (high - low) / 4;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

// About `most` of the points: the lowest and the highest point of each interval.
function thinned(dots, most = 400) {
  if (dots.length <= most) return dots;
  const size = Math.ceil((2 * dots.length) / most);
  const kept = [];
  for (let start = 0; start < dots.length; start += size) {
    const part = dots.slice(start, start + size);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}
