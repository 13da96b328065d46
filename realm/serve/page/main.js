// Shows a view. The part of the address after # is the name of the view. A view is a function that fills `main`.

import { TOKEN, address, age, busy, el, field, get, problem } from "./dom.js";
import { askView } from "./ask.js";
import { fillView } from "./fill.js";
import { knowledgeView, passageView } from "./knowledge.js";
import { trainingView } from "./training.js";

const VIEWS = { ask: askView, fill: fillView, knowledge: knowledgeView, training: trainingView, passage: passageView };
const main = document.getElementById("main");
const links = [...document.querySelectorAll("nav a")];
let leave = null;
let turn = 0;

export const server = { health: null };

async function show() {
  const [path, query] = location.hash.slice(1).split("?", 2);
  const [name, ...rest] = path.split("/");
  const view = VIEWS[name] ?? askView;
  const shown = VIEWS[name] ? name : "ask";
  const mine = (turn += 1);
  leave?.();
  leave = null;
  for (const link of links) {
    const here = link.hash === `#${shown === "passage" ? "knowledge" : shown}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${shown[0].toUpperCase()}${shown.slice(1)} · realm`;
  const place = el("div"); // each view has its own element, so that late results of a view that was left are not shown
  main.replaceChildren(place);
  try {
    server.health ??= await get("health");
    if (server.health.private && !(await admitted())) {
      if (mine === turn) askForToken(place);
      return;
    }
    if (mine !== turn) return; // another view has been opened meanwhile
    const end = (await view(place, server.health, rest.map(decodeURIComponent), new URLSearchParams(query))) ?? null;
    if (mine === turn) leave = end;
    else end?.();
  } catch (error) {
    place.replaceChildren(problem(error));
  }
}

// Whether this tab has a token that the private server accepts. Each view asks the server, whose token may have changed.
async function admitted() {
  if (!sessionStorage.getItem(TOKEN)) return false;
  return get("v1/versions").then(() => true, (error) => {
    if (error.status !== 401) throw error;
    return false;
  });
}

function askForToken(place) {
  const token = el("input", { type: "password", autocomplete: "off", required: true });
  const said = el("div", { role: "status" });
  place.append(el("form", { class: "panel gate", onsubmit: open }, el("h1", {}, "This server is private"),
    field("Token", token), el("button", { type: "submit" }, "Open"), said));
  token.focus();

  async function open(event) {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, token.value);
    busy(event.target, true);
    try {
      if (await admitted()) return await show();
      said.replaceChildren(problem(new Error("This token is not the server's.")));
    } catch (error) {
      said.replaceChildren(problem(error));
    }
    busy(event.target, false);
  }
}

async function serving() {
  const place = document.getElementById("serving");
  try {
    const health = (server.health = await get("health"));
    place.replaceChildren(
      el("b", {}, health.model),
      ` ${health.passages.toLocaleString("en")} passages · index ${health.index.version}, ${age(health.index.created)}`,
    );
    place.classList.toggle("stale", health.status !== "ok");
    place.title = health.problem ?? "";
  } catch (error) {
    place.replaceChildren(error.message);
    place.classList.add("stale");
  }
}

addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
});
addEventListener("realm:changed", serving);
addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=radio]), textarea, select");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing) typing.blur();
  const first = main.querySelector("input[type=text], input[type=search], textarea");
  const fresh = typing === first && first && first.selectionStart === 0 && first.selectionEnd === first.value.length;
  if (typing && !(fresh && event.key === "/")) return; // in a field that is empty or selected, "/" is a shortcut and not typed
  if (event.key === "/") {
    if (first) {
      event.preventDefault();
      first.focus();
      first.select();
    }
  } else if (links[Number(event.key) - 1]) {
    location.hash = links[Number(event.key) - 1].hash;
  }
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part of the address after # is the name of the view, and must not change
  main.focus();
});

// An address such as `?q=Who+wrote+The+Tempest%3F`, to which a browser's search field or a link of another program leads.
const linked = new URLSearchParams(location.search).get("q");
if (linked !== null) history.replaceState(null, "", location.pathname + address("ask", { question: linked }));

await serving();
setInterval(serving, 15000);
await show(); // the view of an empty folder of training runs waits for the first run
