// Functions for elements and requests. Text is inserted as text and never as markup, which the page's security policy forbids.

export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export class Refused extends Error {
  constructor(status, detail, parameter) {
    super(detail);
    this.status = status;
    this.parameter = parameter; // the part of the request that must be changed, if the server named it
  }
}

export const TOKEN = "realm-token";

// Paths are relative, so that the page also works under a prefix of a reverse proxy.
export async function ask(method, path, body, token, signal) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  token ||= sessionStorage.getItem(TOKEN); // a private server also requires a token for reading
  if (token) headers.Authorization = `Bearer ${token}`;
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  } catch {
    throw new Refused(0, "The server cannot be reached.");
  }
  const said = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, said.detail ?? `${response.status} ${response.statusText}`, said.parameter);
  return said;
}

export const get = (path) => ask("GET", path);
export const post = (path, body, token) => ask("POST", path, body, token);
export const question = (path, body, signal) => ask("POST", path, body, undefined, signal);

// Only the result of the newest request is used. Each call aborts the previous request and returns the abort signal for the
// next request; the caller must drop the result of an aborted request.
export function newest() {
  let controller = new AbortController();
  return () => {
    controller.abort();
    controller = new AbortController();
    return controller.signal;
  };
}

// The address of a view, with the values of its form, so that the view can be shared, reloaded and reached with the back button.
// A form without a filter has an address without `where`.
export function address(view, { where, ...values }) {
  return `#${view}?${new URLSearchParams(where ? { ...values, where } : values)}`;
}

export function remember(to) {
  if (to !== location.hash) history.pushState(null, "", to);
}

// A field for a question, with a message if the question is empty or too long. (A browser would cut the question without a message.)
export function asking(label, input, most) {
  const note = el("p", { class: "note", id: `note-${(count += 1)}`, role: "status" });
  const place = field(label, input);
  input.setAttribute("aria-describedby", note.id);
  input.addEventListener("input", () => say(problemOf(input.value)));
  place.append(note);
  return { place, check };

  function problemOf(text) {
    const length = [...text].length;
    return length > most ? `${length.toLocaleString("en")} characters: shorten it to ${most.toLocaleString("en")}.` : "";
  }

  function check() {
    const wrong = input.value.trim() ? problemOf(input.value) : "Type something first.";
    say(wrong);
    if (wrong) input.focus();
    return !wrong;
  }

  function say(text) {
    if (note.textContent !== text) note.textContent = text;
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}

// The text with its spans marked. The offsets of spans count characters, as in Python, and not UTF-16 units.
export function marked(text, spans) {
  const characters = [...text];
  const parts = [];
  let place = 0;
  for (const [start, end] of [...spans].sort((a, b) => a[0] - b[0])) {
    if (start < place) continue;
    parts.push(characters.slice(place, start).join(""), el("mark", {}, characters.slice(start, end).join("")));
    place = end;
  }
  return [...parts, characters.slice(place).join("")];
}

// The fields of a document. An address becomes a link; other schemes than http and https could run scripts.
export function fieldList(fields) {
  const entries = Object.entries(fields ?? {});
  if (!entries.length) return null;
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const isAddress = (value) => typeof value === "string" && /^https?:\/\/\S+$/i.test(value);
  return el("dl", { class: "fields" }, entries.map(([name, value]) => el("div", {}, el("dt", {}, name),
    el("dd", {}, isAddress(value) ? el("a", { href: value, rel: "noopener noreferrer" }, value) : shown(value)))));
}

// The name of a passage: its title, or the id of its document.
export const nameOf = (passage) => passage.title.trim() || passage.document || "untitled";

export function percent(p) {
  if (p >= 0.9995) return "100%";
  if (p >= 0.0995) return `${(100 * p).toFixed(0)}%`;
  if (p >= 0.001) return `${(100 * p).toFixed(1)}%`;
  return p > 0 ? "<0.1%" : "0%";
}

// A share as a bar. Screen readers skip the bar, because the number beside the bar has the same information.
export function bar(share, kind = "") {
  const inner = el("span", { class: "bar-in" });
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: `bar ${kind}`, "aria-hidden": "true" }, inner);
}

export function age(date) {
  const seconds = Math.max(0, (Date.now() - new Date(date)) / 1000);
  const [unit, size] = [["day", 86400], ["h", 3600], ["min", 60]].find(([, s]) => seconds >= s) ?? ["s", 1];
  const count = Math.floor(seconds / size);
  return `${count} ${unit}${unit === "day" && count !== 1 ? "s" : ""} old`;
}

export function problem(error) {
  return el("p", { class: "problem", role: "alert" }, error.message);
}

export function busy(form, on) {
  waiting(form, on);
  for (const button of form.querySelectorAll("button[type=submit]")) button.disabled = on;
}

export function waiting(element, on) {
  if (on) element.setAttribute("aria-busy", "true");
  else element.removeAttribute("aria-busy");
}

// A wordpiece for people: a wordpiece that continues a word begins with an ellipsis.
export const piece = (text) => text.replace(/^##/, "…");

let count = 0;
export function field(label, input, note) {
  input.id ||= `field-${(count += 1)}`;
  return el("div", { class: "field" }, el("label", { for: input.id }, label, note ? el("small", {}, ` ${note}`) : null), input);
}

// A choice of one of several options, as radio buttons that look like a single control.
export function choice(legend, name, options, chosen, onchange) {
  return el(
    "fieldset",
    { class: "choice" },
    el("legend", {}, legend),
    ...options.map(([value, text]) =>
      el("label", {}, el("input", { type: "radio", name, value, checked: value === chosen, onchange }), el("span", {}, text)),
    ),
  );
}
