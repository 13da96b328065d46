// Explanations of the numbers on the page, in elements that a person can open.

import { el } from "./dom.js";

const MEANINGS = {
  "p(z|x)": ["p(z|x)", "The retriever's probability of passage z for question x, before the passage is read. The probabilities of all passages that were read for this question and of the null passage add up to 100%."],
  span: ["span score", "How well a span (a piece of the passage) fits as an answer. Only scores of spans for the same question can be compared. The probability beside a score is relative to all spans of all passages that were read."],
  probability: ["probability", "The probability that this answer is right; it may have a few words more, or less, than the usual answer. If the model is calibrated, the probability was fitted on questions with known answers; otherwise it is the share of the answer among all spans of the passages that were read. The words beside the number are \"very likely right\" from 80%, \"probably right\" from 50%, and otherwise \"unsure\". If the probability of the best answer is below the model's threshold, there is no confident answer: the page shows the best passages first, and the best answer only as a guess."],
  null: ["null passage", "An empty passage that is ranked together with the retrieved passages. The p(z|x) of the null passage is high if the model expects little help from the retrieved passages."],
  likelihood: ["p(y|z,x)", "The probability of the predicted words y when the model reads sentence x together with passage z."],
  nats: ["nats", "A difference of natural logarithms of probabilities. A passage that raises a prediction by 0.69 nats doubles the probability of the prediction; with 2.3 nats the probability becomes ten times as large. A passage that lowers a prediction divides the probability by the same factors."],
};

// Least probability of an answer that is shown beside the best answer.
export const LIKELY = 0.05;

// A level, which has a colour, and words for the probability of an answer; `found` is false if the best answer is only a guess.
export function sureness(probability, found) {
  if (!found) return ["none", "A guess"];
  if (probability >= 0.8) return ["high", "Very likely right"];
  return probability >= 0.5 ? ["medium", "Probably right"] : ["low", "Unsure"];
}

// A details element that explains these terms. It can be used with pointer, keyboard and screen reader.
export function explain(...names) {
  const meanings = names.map((name) => MEANINGS[name]);
  return el("details", { class: "explain" },
    el("summary", {}, `What do ${new Intl.ListFormat("en").format(meanings.map(([term]) => term))} mean?`),
    el("dl", {}, meanings.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text)))));
}
