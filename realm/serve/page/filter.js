// The field for a filter over the fields of documents, such as `year >= 2020`. A corpus without fields has no such field.

import { el, field } from "./dom.js";

// `corpus` is the promise of the response of `v1/corpus`. The field is shown when the fields of the corpus are known, or at once
// if `value`, the filter in the address, is not empty.
export function filtering(corpus, value) {
  const input = el("input", {
    type: "text", name: "where", autocomplete: "off", autocapitalize: "off", spellcheck: "false", value, enterkeyhint: "go",
  });
  const note = el("p", { class: "note", role: "status" });
  const help = el("div", {});
  const place = el("div", { class: "filter", hidden: !value }, field("Filter", input, "(only documents whose fields match)"), note, help);
  note.id = `${input.id}-note`;
  input.setAttribute("aria-describedby", note.id);
  input.addEventListener("input", () => say(""));
  corpus.then(explain, () => {}); // the view itself shows that the server cannot be reached
  return { place, value: () => input.value.trim(), refused };

  function explain({ fields, filter }) {
    const names = Object.entries(fields);
    if (!names.length) return;
    place.hidden = false;
    help.replaceChildren(el("details", { class: "explain" },
      el("summary", {}, "Which fields are there?"),
      el("dl", { class: "names" }, names.map(([name, kind]) => el("div", {}, el("dt", {}, name), el("dd", {}, kind)))),
      el("p", {}, "Besides these fields, a filter can use ", el("code", {}, "id"), " and ", el("code", {}, "title"),
        ". Comparisons are joined by ", el("code", {}, "and"), ", ", el("code", {}, "or"), " and ", el("code", {}, "not"), "."),
      filter ? el("p", {}, "For example: ", el("button", { type: "button", class: "other", onclick: () => take(filter) }, filter)) : null));
  }

  function take(filter) {
    input.value = filter;
    say("");
    input.focus();
  }

  // Shows an error beside the field if the server refused the filter. Returns whether it did.
  function refused(error) {
    if (error.parameter !== "where") return false;
    say(error.message);
    place.hidden = false;
    input.focus();
    return true;
  }

  function say(text) {
    note.textContent = text;
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
}
