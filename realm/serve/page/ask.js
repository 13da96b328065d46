// Ask: the answer large, and below it why: the passages that were read, with p(z|x), the span and its score.

import { age, bar, busy, choice, el, field, marked, percent, post, problem, waiting } from "./dom.js";

const METHODS = [["dense", "Dense"], ["bm25", "BM25"], ["hybrid", "Hybrid"]];
const SAYS = { dense: "by vectors", bm25: "by words", hybrid: "by both" };
const last = { question: "", method: "dense", read: 5, out: null };

export function askView(main, health) {
  if (!health.answers) {
    main.replaceChildren(
      el("h1", {}, "Ask"),
      el("p", {}, "This model fills and retrieves; to answer, it needs a span reader: ", el("code", {}, "realm finetune"), "."),
    );
    return;
  }
  const input = el("input", {
    type: "text", name: "question", autocomplete: "off", maxlength: 2000, required: true, value: last.question,
    placeholder: "Who wrote The Tempest?", enterkeyhint: "go",
  });
  const out = last.out ?? el("section", { class: "results", "aria-live": "polite", "aria-label": "Answers" });
  const methods = choice("Rank by", "method", [...METHODS, ["compare", "Compare"]], last.method, again);
  const read = el("select", { onchange: again }, [3, 5, 10, 20].filter((n) => n <= health.limits.most_read).map((n) => el("option", { value: n, selected: n === last.read }, String(n))));
  const form = el(
    "form",
    { class: "ask", role: "search", onsubmit: submit },
    el("h1", { class: "sr" }, "Ask"),
    el("div", { class: "line big" }, field("Question", input), el("button", { type: "submit" }, "Ask")),
    el("div", { class: "line options" }, methods, field("Read", read)),
  );
  main.append(form, out);
  if (!last.out) out.append(el("p", { class: "hint" }, "Every answer is a piece of a passage. The passages that were read for it stand beside it, each with its best piece marked."));
  input.focus({ preventScroll: true });
  let turn = 0;

  function again() {
    if (input.value.trim()) submit();
  }

  async function submit(event) {
    event?.preventDefault();
    const mine = (turn += 1);
    Object.assign(last, { question: input.value, method: form.elements.method.value, read: Number(read.value), out });
    const asked = last.method === "compare" ? METHODS.map(([m]) => m) : [last.method];
    busy(form, true);
    waiting(out, true);
    try {
      const said = await Promise.all(asked.map((method) => post("answer", { question: last.question, method, top_k: last.read })));
      if (mine !== turn) return; // another question was faster than this answer
      out.replaceChildren(
        el("div", { class: `columns of-${said.length}` }, said.map((one, n) => column(one, asked[n], said.length > 1))),
      );
    } catch (error) {
      if (mine === turn) out.replaceChildren(problem(error));
    } finally {
      if (mine === turn) {
        busy(form, false);
        waiting(out, false);
      }
    }
  }
}

function column(said, method, named) {
  const [best] = said.answers;
  const level = named ? 3 : 2; // of the headings below the method's, or the page's
  const cards = said.passages.map((passage) => card(passage, `h${level + 1}`));
  const heading = named ? el("h2", { class: "method" }, METHODS.find(([m]) => m === method)[1], el("small", {}, ` ${SAYS[method]}`)) : null;
  if (!best) return el("article", { class: "column" }, heading, el("p", { class: "answer none" }, "No passage to read."));
  const others = said.answers.slice(1).map((answer) =>
    el("li", {}, el("button", { type: "button", class: "other", onclick: () => choose(answer) }, answer.text, el("small", {}, ` ${percent(answer.probability)}`))),
  );
  const answer = el("p", { class: "answer" });
  const source = el("p", { class: "source" });
  const list = el("ol", { class: "cards" }, cards.map((one) => one.element));
  choose(best);
  return el(
    "article",
    { class: "column" },
    el("div", { class: "best" },
      heading,
      answer,
      source,
      others.length ? el("div", { class: "others" }, el(`h${level}`, { class: "minor" }, "Or"), el("ul", {}, others)) : null,
      facts(said)),
    el("div", { class: "evidence" }, el(`h${level}`, { class: "minor" }, "Evidence"), list),
  );

  function choose(chosen) {
    answer.replaceChildren(chosen.text);
    source.replaceChildren(
      `Probability ${percent(chosen.probability)}, from `,
      el("a", { href: `#passage/${chosen.passage.id}` }, chosen.passage.title || "untitled"),
    );
    for (const one of cards) one.show(chosen);
  }
}

function facts(said) {
  const stages = Object.entries(said.ms);
  const total = stages.reduce((sum, [, ms]) => sum + ms, 0);
  return el(
    "dl",
    { class: "facts" },
    el("div", { title: "What the empty passage would get of p(z|x): how little the model expects of these passages" },
      el("dt", {}, "Null passage"), el("dd", {}, percent(said.null_probability), bar(said.null_probability, "null"))),
    el("div", {}, el("dt", {}, "Time"), el("dd", {}, `${total.toFixed(0)} ms`, el("small", {}, stages.map(([stage, ms]) => `${stage} ${ms.toFixed(ms < 10 ? 1 : 0)}`).join(" · ")))),
    el("div", {}, el("dt", {}, "Index"), el("dd", {}, `version ${said.index.version}`, el("small", {}, `step ${said.index.step} · ${age(said.index.created)}`))),
  );
}

function card(passage, heading) {
  const text = el("p", { class: "text" });
  const score = el("span", { class: "score" });
  const element = el(
    "li",
    { class: "card" },
    el("div", { class: "card-top" },
      el("span", { class: "rank", "aria-label": `rank ${passage.rank}` }, String(passage.rank)),
      el(heading, {}, el("a", { href: `#passage/${passage.id}` }, passage.title || "untitled")),
      el("span", { class: "prior" }, el("abbr", { title: "The model's share for this passage among those it read" }, "p(z|x)"), bar(passage.probability), el("b", {}, percent(passage.probability))),
    ),
    text,
    score,
  );
  return { element, show };

  function show(chosen) {
    const shown = chosen.passage.id === passage.id ? chosen : passage.span;
    element.classList.toggle("chosen", chosen.passage.id === passage.id);
    text.replaceChildren(...marked(passage.text, shown ? [[shown.start, shown.end]] : []));
    score.replaceChildren(shown ? `span score ${shown.score.toFixed(2)} · probability ${percent(shown.probability)}` : "no span");
  }
}
