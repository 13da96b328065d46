// The description of the API for people: every request of openapi.json with its parameters, body, examples and responses.

import { el, get, problem } from "./dom.js";

const main = document.getElementById("main");
let schemas = {};

try {
  const description = await get("openapi.json");
  schemas = description.components.schemas;
  const requests = Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, one]) => ({ path, method: method.toUpperCase(), ...one })));
  main.replaceChildren(
    el("h1", {}, "API"),
    el("p", { class: "hint" }, description.info.description, " Version ", description.info.version, ". For programs: ", el("a", { href: "openapi.json" }, "openapi.json"),
      ". Errors are application/problem+json; the field ", el("code", {}, "detail"), " is the reason of the error."),
    el("ul", { class: "contents" }, requests.map((one) => el("li", {}, el("a", { href: `#${one.operationId}` }, el("code", {}, `${one.method} ${one.path}`))))),
    ...requests.map(section),
  );
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
} catch (error) {
  main.replaceChildren(problem(error));
}

function section(request) {
  const body = resolved(request.requestBody?.content["application/json"]?.schema);
  const answer = request.responses["200"];
  const shown = Object.values(answer.content ?? {})[0]?.schema;
  const said = (shown?.anyOf ?? [shown]).map(resolved).filter((one) => one?.properties);
  return el("section", { class: "request", id: request.operationId },
    el("h2", {}, el("code", {}, `${request.method} ${request.path}`)),
    el("p", {}, prose(request.description ?? "")),
    request.security ? el("p", { class: "hint" }, "Needs the header ", el("code", {}, "Authorization: Bearer TOKEN"), ".") : null,
    table("Parameters", (request.parameters ?? []).map((one) => [one.name, kind(one.schema), one.required ? "required" : standard(one.schema), one.description ?? ""])),
    body ? table("Body, JSON", fields(body, true)) : null,
    ...(body?.examples ?? []).map((example) => el("pre", { tabindex: "0" }, curl(request, example))),
    ...[body, ...said].flatMap((one, n) => [n ? table(`Response: ${one.description}`, fields(one, false)) : null, ...inside(one).map((name) => table(name, fields(schemas[name], !n)))]),
    ...said.flatMap((one) => one.examples ?? []).map((example) => el("pre", { tabindex: "0" }, JSON.stringify(example, null, 2))),
    el("p", { class: "hint" }, "Status: ", Object.entries(request.responses).map(([status, one]) => `${status} ${one.description}`).join(", "), "."));
}

function resolved(schema) {
  return schema?.$ref ? schemas[schema.$ref.split("/").at(-1)] : schema;
}

// The names of the schemas of a schema's fields, and of the fields of these schemas.
function inside(schema, found = new Set()) {
  for (const [, name] of JSON.stringify(schema?.properties ?? {}).matchAll(/"#\/components\/schemas\/(\w+)"/g)) {
    if (!found.has(name)) inside(schemas[name], found.add(name));
  }
  return [...found];
}

function fields(schema, sent) {
  const required = new Set(sent ? schema.required : []);
  return Object.entries(schema.properties ?? {}).map(([name, one]) => [name, kind(one), required.has(name) ? "required" : standard(one), one.description ?? resolved(one.items ?? one)?.description ?? ""]);
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(kind).join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function standard(schema) {
  return schema.default === undefined || schema.default === null ? "" : `default ${JSON.stringify(schema.default)}`;
}

function table(caption, rows) {
  if (!rows.length) return null;
  return el("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": caption }, el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ["Name", "Type", "", "Meaning"].map((name) => (name ? el("th", { scope: "col" }, name) : el("td"))))),
    el("tbody", {}, rows.map(([name, ...more]) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, name)), more.map((text) => el("td", {}, prose(text))))))));
}

// A text in which words between backticks are code.
function prose(text) {
  return text.split("`").map((part, n) => (n % 2 ? el("code", {}, part) : part));
}

function curl(request, example) {
  const url = new URL(request.path.slice(1), new URL("./", location.href));
  const token = request.security ? ' -H "Authorization: Bearer $REALM_TOKEN"' : "";
  return `curl -s ${url}${token} -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(example).replaceAll("'", "'\\''")}'`;
}
