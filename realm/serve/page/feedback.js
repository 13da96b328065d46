// Feedback on an answer: right, wrong, or a better answer in a passage. The server stores feedback as questions with answers.

import { TOKEN, busy, el, field, nameOf, post, problem } from "./dom.js";

const forms = new WeakMap(); // evidence -> function that takes the selected text of this evidence
document.addEventListener("selectionchange", () => forms.get(evidenceOf(document.getSelection()))?.());

// `chosen` returns the answer that is shown; `evidence` is the element with the texts of the passages in their order.
export function feedback(question, passages, evidence, chosen) {
  const said = el("div", { role: "status" });
  const token = el("input", { type: "password", autocomplete: "off", required: true });
  const asked = el("form", { class: "panel", hidden: true, onsubmit: again }, field("Token", token, "(of the server, for writing)"), el("button", { type: "submit" }, "Send"));
  const input = el("input", { type: "text", autocomplete: "off", required: true, oninput: () => { place = null; locate(); } });
  const where = el("p", { class: "hint", role: "status" });
  const better = el("button", { type: "button", class: "quiet", "aria-expanded": "false", onclick: open }, "Another answer…");
  const form = el("form", { class: "panel", hidden: true, onsubmit: save },
    field("Better answer", input, "(select it in a passage, or type it as it is written there)"), where, el("button", { type: "submit" }, "Save"));
  const panel = el("div", { class: "feedback" },
    el("div", { class: "others" }, el("span", { class: "minor" }, "Is this answer right?"),
      el("button", { type: "button", class: "quiet", onclick: () => send("right", chosen()) }, "Right"),
      el("button", { type: "button", class: "quiet", onclick: () => send("wrong", chosen()) }, "Wrong"), better),
    form, asked, said);
  let place = null;
  let waiting = null; // the feedback that waits for the token
  forms.set(evidence, take);
  return panel;

  function open() {
    form.hidden = !form.hidden;
    better.setAttribute("aria-expanded", String(!form.hidden));
    if (form.hidden) return;
    take();
    input.focus({ preventScroll: true });
  }

  // Takes the text that is selected in a passage as the better answer.
  function take() {
    const found = form.hidden ? null : selected(evidence);
    if (!found) return;
    place = { ...found, passage: passages[found.passage].id };
    input.value = found.text;
    where.replaceChildren(`In ${name(passages[found.passage])}.`);
  }

  // Looks for the typed text in the passages, first in that of the answer.
  function locate() {
    const text = input.value.trim();
    const order = [...passages].sort((a, b) => (b.id === chosen().passage.id) - (a.id === chosen().passage.id));
    const found = text && order.find((passage) => passage.text.includes(text));
    where.replaceChildren(!text ? "" : found ? `In ${name(found)}.` : "None of these passages has this text.");
    if (!found) return;
    const start = [...found.text.slice(0, found.text.indexOf(text))].length;
    place = { passage: found.id, start, end: start + [...text].length };
  }

  function save(event) {
    event.preventDefault();
    if (!place) locate();
    if (place) send("better", { passage: { id: place.passage }, start: place.start, end: place.end });
    else input.focus();
  }

  function again(event) {
    event.preventDefault();
    send(...waiting);
  }

  async function send(verdict, { passage, start, end }) {
    waiting = [verdict, { passage, start, end }];
    const key = token.value || sessionStorage.getItem(TOKEN);
    if (!key) {
      asked.hidden = false;
      said.replaceChildren(problem(new Error("Feedback needs the server's token for writing: enter the token above.")));
      token.focus();
      return;
    }
    busy(panel, true);
    try {
      const done = await post("v1/feedback", { question, verdict, passage: passage.id, start, end }, key);
      sessionStorage.setItem(TOKEN, key);
      asked.hidden = true;
      said.replaceChildren(el("p", { class: "done" }, done.new ? `Saved as ${verdict}.` : `This was already saved as ${verdict}.`));
    } catch (error) {
      asked.hidden = error.status !== 401;
      said.replaceChildren(problem(error));
    } finally {
      busy(panel, false);
    }
  }
}

function name(passage) {
  return `passage ${passage.rank}, ${nameOf(passage)}`;
}

function evidenceOf(selection) {
  return selection?.anchorNode?.parentElement?.closest(".evidence") ?? null;
}

// The selected text of one passage and its place in characters, as in Python; null if the selection is empty or in two passages.
function selected(evidence) {
  const selection = document.getSelection();
  if (!selection || selection.isCollapsed || evidenceOf(selection) !== evidence) return null;
  const range = selection.getRangeAt(0);
  const texts = [...evidence.querySelectorAll(".text")];
  const passage = texts.findIndex((text) => text.contains(range.startContainer) && text.contains(range.endContainer));
  if (passage < 0) return null;
  const before = document.createRange();
  before.selectNodeContents(texts[passage]);
  before.setEnd(range.startContainer, range.startOffset);
  const whole = range.toString();
  const text = whole.trim();
  const start = [...before.toString()].length + [...whole.slice(0, whole.indexOf(text))].length;
  return text ? { passage, text, start, end: start + [...text].length } : null;
}
