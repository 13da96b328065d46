// Explanations of the numbers on the page, in elements that open on request.

import { el } from "./dom.js";

const MEANINGS = {
  "p(z|x)": ["p(z|x)", "The retriever's probability of passage z for question x, before the passage is read. The probabilities of all passages that were read for this question, and of the null passage, add up to 100%."],
  span: ["span score", "How well a span (a piece of the passage) fits as an answer. Scores only compare spans for one question. The probability beside a score is relative to all spans that were considered."],
  probability: ["probability", "How likely this answer is to be right, relative to all spans of the passages that were read. If the model has been calibrated, the probability is corrected on questions with known answers. An answer below the model's threshold is shown as a guess."],
  null: ["null passage", "An empty passage that is ranked together with the retrieved passages. Its p(z|x) is high if the model expects little help from the retrieved passages."],
  likelihood: ["p(y|z,x)", "The probability of the predicted words y when the model reads sentence x together with passage z."],
  nats: ["nats", "A difference of natural logarithms of probabilities. A passage that raises a prediction by 0.69 nats doubles its probability; 2.3 nats multiply it by ten. A passage that lowers it divides by the same factors."],
};

// A details element that explains these terms; it works with pointer, keyboard and screen reader.
export function explain(...names) {
  const meanings = names.map((name) => MEANINGS[name]);
  return el("details", { class: "explain" },
    el("summary", {}, `What do ${new Intl.ListFormat("en").format(meanings.map(([term]) => term))} mean?`),
    el("dl", {}, meanings.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text)))));
}
