// A small line chart in SVG, with a line over the steps for each key. The label has the newest values, or those under the pointer.

import { el, svg } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 170;
const LEFT = 44;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;

export function number(value) {
  if (!Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 0.001) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(size >= 1 ? 4 : 3)));
}

// `panel` is {title, unit, keys: {name: label}, floor?, points?}. The result is null if no row has one of the keys.
export function chart(panel, rows) {
  const series = Object.entries(panel.keys)
    .map(([key, label]) => ({ label, dots: rows.filter((row) => Number.isFinite(row[key]) && Number.isFinite(row.step)).map((row) => [row.step, row[key]]) }))
    .filter((one) => one.dots.length);
  if (!series.length) return null;
  const all = series.flatMap((one) => one.dots);
  const [x0, x1] = wide(extent(all.map(([x]) => x)));
  let [y0, y1] = extent(all.map(([, y]) => y));
  if (panel.floor !== undefined) y0 = Math.min(panel.floor, y0);
  [y0, y1] = wide([y0, y1]);
  const x = (step) => LEFT + ((step - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const newest = series.map((one) => `${one.label ? `${one.label} ` : ""}${number(one.dots.at(-1)[1])}`).join(", ");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${panel.title}, ${panel.unit}, over steps ${number(x0)} to ${number(x1)}; newest ${newest}` });
  for (const value of ticks(y0, y1)) {
    picture.append(
      svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, number(value)),
    );
  }
  for (const [value, anchor] of [[x0, "start"], [x1, "end"]]) {
    picture.append(svg("text", { class: "tick", x: x(value), y: HEIGHT - 7, "text-anchor": anchor }, anchor === "end" ? `step ${number(value)}` : number(value)));
  }
  series.forEach((one, n) => {
    const dots = thinned(one.dots);
    picture.append(svg("path", { class: `line of-${n}`, d: dots.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("") }));
    if (panel.points || dots.length === 1) for (const [a, b] of dots) picture.append(svg("circle", { class: `point of-${n}`, cx: x(a), cy: y(b), r: 2.6 }));
  });
  const rule = svg("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(rule);
  const reading = el("span", { class: "reading" }, newest);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const step = x0 + (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
    const near = series.map((one) => one.dots.reduce((best, dot) => (Math.abs(dot[0] - step) < Math.abs(best[0] - step) ? dot : best)));
    rule.setAttribute("x1", x(near[0][0]));
    rule.setAttribute("x2", x(near[0][0]));
    rule.setAttribute("visibility", "visible");
    reading.textContent = `${near.map((dot, n) => `${series[n].label ? `${series[n].label} ` : ""}${number(dot[1])}`).join(", ")} at ${number(near[0][0])}`;
  });
  picture.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    reading.textContent = newest;
  });
  const legend = series.length > 1 ? el("span", { class: "legend" }, series.map((one, n) => el("span", { class: `key of-${n}` }, one.label))) : null;
  return el("figure", { class: "chart" }, el("figcaption", {}, el("b", {}, panel.title), reading, el("small", {}, panel.unit)), picture, legend);
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
