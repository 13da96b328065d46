// The view "Ask": the answer, and below the answer the passages that were read, with p(z|x), span and span score.

import { address, age, asking, bar, choice, el, field, fieldList, get, marked, nameOf, newest, percent, problem, question, remember, waiting } from "./dom.js";
import { feedback } from "./feedback.js";
import { filtering } from "./filter.js";
import { explain, LIKELY, sureness } from "./words.js";

const METHODS = [["dense", "Dense"], ["bm25", "BM25"], ["hybrid", "Hybrid"]];
const SAYS = { dense: "by vectors", bm25: "by words", hybrid: "by both" };
const READS = [3, 5, 10, 20];
const last = { question: "", method: null, read: null, where: "", out: null, asked: "" };
const next = newest();

export function askView(main, health, path, values) {
  if (!health.answers) {
    main.replaceChildren(
      el("h1", {}, "Ask"),
      el("p", {}, "This model has no span reader, so it can fill and retrieve, but not answer. A span reader is trained by ", el("code", {}, "realm finetune"), "."),
    );
    return;
  }
  const most = health.limits.question_characters;
  const mostRead = health.limits.most_read;
  last.method ??= health.method;
  last.read ??= health.limits.read;
  const shared = values.get("question");
  if (shared !== null) {
    const method = values.get("method");
    const read = Number(values.get("read"));
    last.question = shared;
    last.where = values.get("where") ?? "";
    if (method === "compare" || METHODS.some(([m]) => m === method)) last.method = method;
    if (Number.isInteger(read) && 1 <= read && read <= mostRead) last.read = read;
  }
  const input = el("input", {
    type: "text", name: "question", autocomplete: "off", value: last.question,
    placeholder: "Ask a question", enterkeyhint: "go", onmousedown: pressed,
  });
  let offered = null; // the example question that is in the field until the person types another question
  let chosen = false;
  const out = last.out ?? el("section", { class: "results", "aria-live": "polite", "aria-label": "Answers" });
  const methods = choice("Rank by", "method", [...METHODS, ["compare", "Compare"]], last.method, again);
  const reads = [...new Set([...READS, health.limits.read, last.read])].filter((n) => n <= mostRead).sort((a, b) => a - b);
  const read = el("select", { onchange: again }, reads.map((n) => el("option", { value: n, selected: n === last.read }, String(n))));
  const typed = asking("Question", input, most);
  const corpus = get("v1/corpus");
  const filter = filtering(corpus, last.where);
  const form = el(
    "form",
    { class: "ask", role: "search", onsubmit: submit },
    el("h1", { class: "sr" }, "Ask"),
    el("div", { class: "line big" }, typed.place, el("button", { type: "submit" }, "Ask")),
    el("div", { class: "line options" }, methods, field("Read", read), filter.place),
  );
  main.append(form, out);
  input.focus({ preventScroll: true });
  if (shared !== null && current() !== last.asked) {
    history.replaceState(null, "", current()); // opening an address adds no entry to the history
    submit();
  } else if (last.out) history.replaceState(null, "", last.asked);
  else welcome();

  function again() {
    if (input.value.trim() && input.value !== offered) submit();
  }

  function current() {
    return address("ask", { question: input.value, method: form.elements.method.value, read: read.value, where: filter.value() });
  }

  // What the corpus is, and example questions, which are shown until the first question is asked.
  async function welcome() {
    const place = el("div", { class: "welcome" });
    out.replaceChildren(place);
    try {
      const known = await corpus;
      place.append(el("h2", {}, known.name), about(known));
      const questions = known.passages ? await examples(known) : [];
      if (questions.length) {
        place.append(el("div", { class: "examples" }, el("h3", { class: "minor" }, "For example"),
          el("ul", {}, questions.map((text) => el("li", {}, el("button", { type: "button", class: "other", onclick: () => { input.value = text; submit(); } }, text))))));
        offer(questions[0]);
      }
      place.append(el("p", { class: "hint" }, "An answer is a piece of a passage. Beside the answer are the passages that were read, each with its best piece marked."));
    } catch (error) {
      place.append(problem(error));
    }
  }

  // Puts a question into the field, selected, so that Enter asks it and typing replaces it.
  function offer(text) {
    if (input.value || last.out) return;
    input.value = offered = text;
    if (document.activeElement === input) input.select();
  }

  // The first press selects the whole example, so that typing replaces it; the next press moves the cursor as usual.
  function pressed(event) {
    if (input.value !== offered || chosen) return;
    chosen = true;
    event.preventDefault();
    input.focus();
    input.select();
  }

  async function submit(event) {
    event?.preventDefault();
    if (!typed.check()) return;
    const signal = next();
    Object.assign(last, { question: input.value, method: form.elements.method.value, read: Number(read.value), where: filter.value(), out, asked: current() });
    remember(last.asked);
    const said = last.question;
    const where = last.where || null;
    const heading = el("p", { class: "asked" }, said, where ? el("small", {}, " where ", el("code", {}, where)) : null);
    const methods = last.method === "compare" ? METHODS.map(([m]) => m) : [last.method];
    waiting(form, true);
    waiting(out, true);
    try {
      const all = await Promise.all(methods.map((method) => question("v1/answer", { question: said, method, top_k: last.read, where }, signal)));
      if (signal.aborted) return; // another question has been asked
      out.replaceChildren(
        heading,
        el("div", { class: `columns of-${all.length}` }, all.map((one, n) => column(one, methods[n], all.length > 1, health.writable && all.length === 1, where))),
      );
    } catch (error) {
      if (!signal.aborted) out.replaceChildren(heading, filter.refused(error) ? "" : problem(error));
    } finally {
      if (!signal.aborted) {
        waiting(form, false);
        waiting(out, false);
      }
    }
  }
}

function about(corpus) {
  if (!corpus.passages) return el("p", {}, "There are no documents yet. Documents are added in the view ", el("a", { href: "#knowledge" }, "Knowledge"), ".");
  const titles = corpus.titles.map((title) => el("a", { href: address("knowledge", { search: title, method: "hybrid" }) }, title));
  return el("p", {}, `${count(corpus.documents, "document")} in ${count(corpus.passages, "passage")}${titles.length ? ", such as " : "."}`,
    titles.flatMap((title, n) => [title, n === titles.length - 1 ? "." : n === titles.length - 2 ? " and " : ", "]));
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

// Questions that rules made from the documents. If there are none, questions about titles.
async function examples(corpus) {
  const { questions } = await get("v1/examples");
  return questions.length ? questions : corpus.titles.slice(0, 3).map((title) => `What is said about ${title}?`);
}

function column(said, method, named, writable, where) {
  const [best] = said.answers;
  const level = named ? 3 : 2; // level of the headings below the heading of the method, or below that of the page
  const cards = said.passages.map((passage) => card(passage, `h${level + 1}`));
  const heading = named ? el("h2", { class: "method" }, METHODS.find(([m]) => m === method)[1], el("small", {}, ` ${SAYS[method]}`)) : null;
  if (!best) return el("article", { class: "column" }, heading, el("p", { class: "answer none" }, where ? "No passage that matches the filter was found." : "There is no passage to read."));
  const others = said.answers.slice(1).filter((answer) => answer.probability >= LIKELY).map((answer) =>
    el("li", {}, el("button", { type: "button", class: "other", onclick: () => choose(answer) }, answer.text, el("small", {}, ` ${percent(answer.probability)}`))),
  );
  const answer = el("p", { class: "answer" });
  const source = el("p", { class: "source" });
  const sure = el("p", {});
  const list = el("ol", { class: "cards" }, cards.map((one) => one.element));
  let shown = best;
  choose(best);
  const evidence = el("div", { class: "evidence" },
    el("div", { class: "titled" }, el(`h${level}`, { class: "minor" }, said.found ? "Evidence" : "The best passages"), explain("p(z|x)", "span")), list);
  const answering = el("div", { class: "best" },
    said.found ? heading : el(`h${level}`, { class: "minor" }, "The best guess"),
    sure,
    answer,
    source,
    others.length ? el("div", { class: "others" }, el(`h${level}`, { class: "minor" }, "Or"), el("ul", {}, others)) : null,
    writable ? feedback(said.question, said.passages, evidence, () => shown) : null,
    facts(said), explain("null", "probability"));
  if (said.found) return el("article", { class: "column" }, answering, evidence);
  return el("article", { class: "column unsure" },
    el("div", { class: "verdict" }, heading, el("p", { class: "sure none" }, el("b", {}, "No confident answer"), " These passages fit the question best.")),
    evidence, answering);

  function choose(chosen) {
    const [level, words] = sureness(chosen.probability, said.found);
    sure.className = `sure ${level}`;
    sure.replaceChildren(el("b", {}, words), ` ${percent(chosen.probability)}`, bar(chosen.probability));
    answer.replaceChildren(chosen.text);
    source.replaceChildren("From ", el("a", { href: opened(chosen.passage, chosen) }, nameOf(chosen.passage)));
    for (const one of cards) one.show(chosen);
    shown = chosen;
  }
}

function facts(said) {
  const stages = Object.entries(said.ms);
  const total = stages.reduce((sum, [, ms]) => sum + ms, 0);
  return el(
    "dl",
    { class: "facts" },
    el("div", {},
      el("dt", {}, "Null passage"), el("dd", {}, percent(said.null_probability), bar(said.null_probability, "null"))),
    el("div", {}, el("dt", {}, "Time"), el("dd", {}, `${total.toFixed(0)} ms`, el("small", {}, stages.map(([stage, ms]) => `${stage} ${ms.toFixed(ms < 10 ? 1 : 0)}`).join(" · ")))),
    el("div", {}, el("dt", {}, "Index"), el("dd", {}, `version ${said.index.version}`, el("small", {}, `step ${said.index.step} · ${age(said.index.created)}`))),
  );
}

function card(passage, heading) {
  const text = el("p", { class: "text" });
  const score = el("span", { class: "score" });
  const link = el("a", {}, nameOf(passage));
  const element = el(
    "li",
    { class: "card" },
    el("div", { class: "card-top" },
      el("span", { class: "rank", "aria-label": `rank ${passage.rank}` }, String(passage.rank)),
      el(heading, {}, link),
      el("span", { class: "prior" }, "p(z|x)", bar(passage.probability), el("b", {}, percent(passage.probability))),
    ),
    text,
    score,
    fieldList(passage.fields),
  );
  return { element, show };

  function show(chosen) {
    const shown = chosen.passage.id === passage.id ? chosen : passage.span;
    element.classList.toggle("chosen", chosen.passage.id === passage.id);
    link.href = opened(passage, shown);
    text.replaceChildren(...marked(passage.text, shown ? [[shown.start, shown.end]] : []));
    score.replaceChildren(shown ? `span score ${shown.score.toFixed(2)} · probability ${percent(shown.probability)}` : "no span");
  }
}

// The address of the view of a passage, in which the same piece of the passage is marked.
function opened(passage, span) {
  return span ? address(`passage/${passage.id}`, { start: span.start, end: span.end }) : `#passage/${passage.id}`;
}
