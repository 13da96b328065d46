// The view "Fill": each word of the sentence is a button that masks the word. Below are the predictions, and the effect of each
// passage on the predictions.

import { age, bar, el, field, nameOf, newest, percent, piece, problem, question, waiting } from "./dom.js";
import { explain } from "./words.js";

const EXAMPLE = "The pound is the currency of the UK.";
const last = { sentence: EXAMPLE, masked: new Set([1]) };
const next = newest();

export function fillView(main) {
  const input = el("input", { type: "text", autocomplete: "off", maxlength: 1500, value: last.sentence, oninput: typed });
  const words = el("div", { class: "words", role: "group", "aria-label": "Words to mask" });
  const out = el("section", { class: "results", "aria-live": "polite", "aria-label": "Predictions" });
  main.append(
    el("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); predict(); } },
      el("h1", { class: "sr" }, "Fill"),
      el("div", { class: "line big" }, field("Sentence", input), el("button", { type: "submit" }, "Predict")),
      el("p", { class: "hint", id: "words-hint" }, "Press words to mask them. The model predicts the masked words, and the page shows which passages helped."),
      words,
    ),
    out,
  );
  draw();
  predict();

  function typed() {
    const before = parts();
    last.sentence = input.value;
    const now = parts(); // a masked word that is still at the same place stays masked
    last.masked = new Set([...last.masked].filter((n) => now[n] === before[n]));
    draw();
  }

  // The words, and the punctuation between them, which cannot be masked.
  function parts() {
    return last.sentence.match(/\[MASK\]|[\p{L}\p{N}]+(?:['’\-][\p{L}\p{N}]+)*|[^\p{L}\p{N}\s]/gu) ?? [];
  }

  function hideable(part) {
    return part !== "[MASK]" && /[\p{L}\p{N}]/u.test(part);
  }

  function draw() {
    words.replaceChildren(
      ...parts().map((part, n) =>
        hideable(part)
          ? el("button", {
              type: "button", class: "word", "aria-pressed": String(last.masked.has(n)), "data-word": n,
              "aria-label": last.masked.has(n) ? `${part}, masked` : part, onclick: () => toggle(n),
            }, last.masked.has(n) ? "[MASK]" : part)
          : el("span", { class: "between" }, part),
      ),
    );
  }

  function toggle(n) {
    if (!last.masked.delete(n)) last.masked.add(n);
    draw();
    words.querySelector(`[data-word="${n}"]`)?.focus();
    predict();
  }

  function masked() {
    let n = -1;
    return last.sentence.replace(/\[MASK\]|[\p{L}\p{N}]+(?:['’\-][\p{L}\p{N}]+)*|[^\p{L}\p{N}\s]/gu, (part) => {
      n += 1;
      return last.masked.has(n) && hideable(part) ? "[MASK]" : part;
    });
  }

  async function predict() {
    const signal = next();
    const sentence = masked();
    if (!sentence.includes("[MASK]")) {
      out.replaceChildren(el("p", { class: "hint" }, "No word is masked."));
      waiting(out, false);
      return;
    }
    waiting(out, true);
    try {
      const said = await question("v1/fill", { sentence }, signal);
      if (!signal.aborted) out.replaceChildren(...results(said));
    } catch (error) {
      if (!signal.aborted) out.replaceChildren(problem(error));
    } finally {
      if (!signal.aborted) waiting(out, false);
    }
  }
}

function results(said) {
  const most = Math.max(1, ...said.passages.map((passage) => Math.abs(passage.utility)));
  const many = said.masks.length > 1;
  return [el("div", { class: "filled" },
    el("div", { class: "masks" }, said.masks.map((predictions, n) =>
      el("article", { class: "mask" },
        el("h2", { class: many ? "" : "sr" }, `[MASK] ${n + 1}`),
        el("p", { class: "answer" }, piece(predictions[0].text)),
        el("ol", { class: "predictions" }, predictions.map((one) =>
          el("li", {}, el("span", { class: "name" }, piece(one.text)), bar(one.probability), el("b", {}, percent(one.probability)))))))),
    el("div", {},
    el("h2", {}, "Effect of the passages ", el("small", {}, `on “${said.masks.map(([best]) => piece(best.text)).join(" … ")}”`)),
    el("p", { class: "hint" },
      "The probability without a passage is ", el("b", {}, percent(said.null.likelihood)),
      ". Each passage ", el("span", { class: "up" }, "▲ raised"), " or ", el("span", { class: "down" }, "▼ lowered"), " this probability, by its utility in nats. ",
      `Index version ${said.index.version}, step ${said.index.step}, ${age(said.index.created)}; ${said.ms.fill.toFixed(0)} ms.`),
    explain("p(z|x)", "likelihood", "nats"),
    el("ol", { class: "cards" }, said.passages.map((passage) => effect(passage, most)))),
  )];
}

function effect(passage, most) {
  const up = passage.utility >= 0;
  const diverging = el("span", { class: `diverging ${up ? "up" : "down"}`, "aria-hidden": "true" }, el("span"));
  diverging.firstChild.style.width = `${(50 * Math.abs(passage.utility)) / most}%`;
  return el(
    "li",
    { class: "card" },
    el("div", { class: "card-top" },
      el("span", { class: "rank", "aria-label": `rank ${passage.rank}` }, String(passage.rank)),
      el("h3", {}, el("a", { href: `#passage/${passage.id}` }, nameOf(passage))),
      el("span", { class: "prior" }, "p(z|x)", bar(passage.probability), el("b", {}, percent(passage.probability))),
    ),
    el("div", { class: "effect" },
      el("span", { class: up ? "up" : "down" }, `${up ? "▲ raised" : "▼ lowered"} by ${Math.abs(passage.utility).toFixed(2)} nats`),
      diverging,
      el("span", {}, "p(y|z,x) ", el("b", {}, percent(passage.likelihood))),
    ),
    el("p", { class: "text short" }, passage.text),
  );
}
