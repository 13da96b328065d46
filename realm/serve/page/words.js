// What the numbers on the page mean, in a few sentences that open where they are needed.

import { el } from "./dom.js";

const MEANINGS = {
  "p(z|x)": ["p(z|x)", "How much the model trusts passage z for question x, before it reads the passage: a share of 100% that all passages read for this question divide between them."],
  span: ["span score", "How well a piece of the passage fits as an answer. Scores compare pieces for one question; they have no fixed scale. The probability beside a score is the piece's share among all pieces that were considered."],
  probability: ["probability", "How likely this answer is to be right: its share among all pieces of the passages that were read, corrected on questions with known answers where the model has been calibrated. Below the model's threshold an answer is shown as a guess."],
  null: ["null passage", "An empty passage that competes with the real ones. Its share of p(z|x) is high where the model expects little help from what it found."],
  likelihood: ["p(y|z,x)", "How probable the predicted words y are when the model reads passage z beside the sentence x."],
  nats: ["nats", "A difference of logarithms to base e. A passage that raises the prediction by 0.69 nats makes it twice as probable, by 2.3 nats ten times; lowering divides instead."],
};

// A disclosure that explains these terms; the browser opens it by pointer, keyboard and screen reader alike.
export function explain(...names) {
  const meanings = names.map((name) => MEANINGS[name]);
  return el("details", { class: "explain" },
    el("summary", {}, `What do ${new Intl.ListFormat("en").format(meanings.map(([term]) => term))} mean?`),
    el("dl", {}, meanings.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text)))));
}
