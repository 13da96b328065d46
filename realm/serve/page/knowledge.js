// The view "Knowledge": passages can be searched, documents added and deleted, and the answer to a question watched.

import { TOKEN, address, age, ask, asking, busy, choice, el, field, fieldList, get, marked, nameOf, newest, percent, problem, question as put, remember, waiting } from "./dom.js";
import { filtering } from "./filter.js";

const last = { search: "", method: "hybrid", where: "", watched: "", answers: [] };
const RANKINGS = [["hybrid", "Hybrid"], ["dense", "Dense"], ["bm25", "BM25"]];
const next = newest();
const nextWatched = newest();

export async function knowledgeView(main, health, path, values) {
  if (values.has("search")) {
    last.search = values.get("search");
    last.where = values.get("where") ?? "";
    if (RANKINGS.some(([m]) => m === values.get("method"))) last.method = values.get("method");
  }
  const most = health.limits.question_characters;
  const found = el("section", { class: "found", "aria-live": "polite", "aria-label": "Passages found" });
  const input = el("input", { type: "search", autocomplete: "off", value: last.search, placeholder: "Search passages", enterkeyhint: "search" });
  const searched = asking("Search", input, most);
  const filter = filtering(get("v1/corpus"), last.where);
  const form = el("form", { class: "ask", role: "search", onsubmit: search },
    el("h1", { class: "sr" }, "Knowledge"),
    el("div", { class: "line big" }, searched.place, el("button", { type: "submit" }, "Search")),
    el("div", { class: "line options" }, choice("Rank by", "rank", RANKINGS, last.method, () => input.value.trim() && search()), filter.place),
  );
  const token = el("input", { type: "password", autocomplete: "off", value: sessionStorage.getItem(TOKEN) ?? "" });
  const said = el("div", { role: "status", class: "said" });
  const watched = el("ol", { class: "watched" });
  const question = el("input", { type: "text", autocomplete: "off", value: last.watched, placeholder: "Question to ask again after each change" });
  const watching = asking("Question", question, most);
  const versions = el("div", { class: "versions" });
  const side = el("aside", { class: "side", "aria-label": "Change the knowledge" },
    health.answers ? el("form", { class: "panel", onsubmit: watch }, el("h2", {}, "Watch an answer"), watching.place, el("button", { type: "submit", class: "quiet" }, "Ask now"), watched) : null,
    health.writable ? writing() : el("div", { class: "panel" }, el("h2", {}, "Read only"), el("p", { class: "hint" }, "Start the server with ", el("code", {}, "--writable"), " to add and delete documents here.")),
    el("div", { class: "panel" }, el("h2", {}, "Versions"), versions),
  );
  main.append(el("div", { class: "split" }, el("div", {}, form, found), side));
  drawWatched();
  await drawVersions();
  if (last.search) await refresh();
  else found.append(el("p", { class: "hint" }, `${health.passages.toLocaleString("en")} passages of ${health.documents.toLocaleString("en")} documents.`));

  function writing() {
    const title = el("input", { type: "text", maxlength: 1000, required: true });
    const text = el("textarea", { rows: 6, required: true });
    const id = el("input", { type: "text", maxlength: 1000 });
    return el("form", { class: "panel", onsubmit: add }, el("h2", {}, "Add a document"),
      field("Title", title), field("Text", text), field("Id", id, "(if empty, the title is the id; a document with the same id is replaced)"), field("Token", token),
      el("button", { type: "submit" }, "Add"), said);

    async function add(event) {
      event.preventDefault();
      const form = event.target;
      busy(form, true);
      try {
        const document = { title: title.value, text: text.value };
        if (id.value.trim()) document.id = id.value;
        const done = await write("POST", "v1/documents", { documents: [document] });
        const what = done.added ? "Added" : done.replaced ? "Replaced" : "Unchanged";
        said.replaceChildren(el("p", { class: "done" }, `${what}: ${done.ids[0]}, ${done.passages_added} new passage${done.passages_added === 1 ? "" : "s"}. The document can be found now.`));
        if (!done.unchanged) form.reset();
        token.value = sessionStorage.getItem(TOKEN) ?? "";
        await changed(`added ${done.ids[0]}`);
      } catch (error) {
        said.replaceChildren(problem(error));
      } finally {
        busy(form, false);
      }
    }
  }

  // The tab keeps the token only after the server has accepted it, because a private server needs the token of the tab for reading.
  async function write(method, path, body) {
    const done = await ask(method, path, body, token.value);
    if (token.value) sessionStorage.setItem(TOKEN, token.value);
    return done;
  }

  async function remove(id, button) {
    if (button.dataset.sure !== "yes") { // a second press of the button replaces a dialog
      button.dataset.sure = "yes";
      button.textContent = "Delete for good?";
      button.focus(); // Safari does not focus a button that is clicked
      // There is no time limit, because a person with a screen reader may need longer than any limit.
      button.addEventListener("blur", () => { button.dataset.sure = ""; button.textContent = "Delete document"; }, { once: true });
      return;
    }
    try {
      await write("DELETE", `v1/documents/${encodeURIComponent(id)}`);
      said.replaceChildren(el("p", { class: "done" }, `Deleted: ${id}.`));
      await changed(`deleted ${id}`);
    } catch (error) {
      said.replaceChildren(problem(error));
      token.focus();
    }
  }

  async function changed(what) {
    dispatchEvent(new Event("realm:changed"));
    await Promise.all([drawVersions(), last.search ? refresh() : null, last.watched ? again(what) : null]);
  }

  function current() {
    return address("knowledge", { search: input.value, method: form.elements.rank.value, where: filter.value() });
  }

  // Searches without a new entry in the history, because a new entry would keep Back in this view.
  async function refresh() {
    if (!main.isConnected) return; // another view has been opened meanwhile, and has its own address
    history.replaceState(null, "", current());
    await search();
  }

  async function search(event) {
    event?.preventDefault();
    if (!searched.check()) return;
    const signal = next();
    Object.assign(last, { search: input.value, method: form.elements.rank.value, where: filter.value() });
    remember(current());
    waiting(form, true);
    try {
      const hits = await put("v1/retrieve", { question: last.search, method: last.method, top_k: 10, where: last.where || null }, signal);
      if (!signal.aborted) found.replaceChildren(el("h2", { class: "sr" }, "Passages found"), hits.passages.length ? el("ol", { class: "cards" }, hits.passages.map(hit)) : el("p", { class: "hint" }, "No passage was found."));
    } catch (error) {
      if (!signal.aborted) found.replaceChildren(filter.refused(error) ? "" : problem(error));
    } finally {
      if (!signal.aborted) waiting(form, false);
    }
  }

  function hit(passage, n) {
    const button = el("button", { type: "button", class: "quiet danger", onclick: () => remove(passage.document, button) }, "Delete document");
    return el("li", { class: "card" },
      el("div", { class: "card-top" },
        el("span", { class: "rank", "aria-label": `rank ${n + 1}` }, String(n + 1)),
        el("h3", {}, el("a", { href: `#passage/${passage.id}` }, nameOf(passage))),
        el("span", { class: "score" }, `score ${passage.score.toPrecision(3)}`)),
      el("p", { class: "text short" }, passage.text),
      fieldList(passage.fields),
      el("div", { class: "card-end" }, el("small", {}, `document ${passage.document}`), health.writable ? button : null));
  }

  async function watch(event) {
    event.preventDefault();
    if (!watching.check()) return;
    if (last.watched !== question.value) last.answers = [];
    last.watched = question.value;
    await again("asked");
  }

  async function again(what) {
    const signal = nextWatched();
    try {
      const { answers, index } = await put("v1/answer", { question: last.watched }, signal);
      if (signal.aborted) return;
      const [best] = answers;
      last.answers.unshift({ what, text: best?.text ?? "no answer", title: best ? nameOf(best.passage) : "", p: best?.probability ?? 0, index });
      last.answers.length = Math.min(last.answers.length, 6);
      drawWatched();
    } catch (error) {
      if (!signal.aborted) watched.prepend(el("li", {}, problem(error)));
    }
  }

  function drawWatched() {
    watched.replaceChildren(...last.answers.map((one, n) =>
      el("li", { class: n && one.text === last.answers[n - 1].text ? "same" : "" },
        el("span", { class: "when" }, one.what), el("b", {}, one.text), el("small", {}, ` ${percent(one.p)} · ${one.title} · index ${one.index.version}, knowledge ${one.index.knowledge}`))));
  }

  async function drawVersions() {
    const all = await get("v1/versions");
    const table = (name, rows, used) => el("table", {}, el("caption", {}, name),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Version"), el("th", { scope: "col" }, "Committed"))),
      el("tbody", {}, rows.slice(0, 6).map((row) => el("tr", { class: row.version === used ? "used" : "" },
        el("td", {}, String(row.version), row.version === used ? el("small", {}, " in use") : null),
        el("td", {}, el("time", { datetime: row.created }, new Date(row.created).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })), el("small", {}, ` ${age(row.created)}`))))));
    versions.replaceChildren(table("Knowledge", all.knowledge, all.in_use.knowledge), table("Index", all.index, all.in_use.version));
  }
}

export async function passageView(main, health, [id], values) {
  const passage = await get(`v1/passages/${encodeURIComponent(id)}`);
  const step = (to, text) => (to ? el("a", { href: `#passage/${to}` }, text) : el("span", { class: "off" }, text));
  const [start, end] = ["start", "end"].map((name) => Number(values.get(name)));
  const spans = Number.isInteger(start) && Number.isInteger(end) && 0 <= start && start < end ? [[start, end]] : [];
  main.append(el("article", { class: "passage" },
    el("p", { class: "crumbs" }, el("a", { href: "#knowledge" }, "Knowledge")),
    el("h1", {}, nameOf(passage)),
    el("p", { class: "source" }, "From the document ", el("b", {}, passage.document)),
    fieldList(passage.fields),
    el("p", { class: "text" }, marked(passage.text, spans)),
    el("p", { class: "steps" }, step(passage.previous, "← Previous passage"), step(passage.next, "Next passage →")),
    el("p", { class: "hint" }, "Passage ", el("code", {}, passage.id))));
}
