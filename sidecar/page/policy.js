// The figures of all instances, and which policy is in force.

import { arrange, draw, make, say } from "./dom.js";
import { age, micros, NONE, percent, rate } from "./format.js";

const POINTS = 120;
const FIGURES = [
  ["decisions", "decisions/s", rate, "requests decided a second"],
  ["hit", "hit", percent, "sent where their cache is, of all decided"],
  ["spill", "spill", percent, "kept off their preferred rank by load or stale reports"],
  ["fallback", "fallback", percent, "without any affinity key"],
  ["bypass", "bypass", percent, "decided by the hook alone, of all requests"],
  ["cached", "cached tokens", percent, "prompt tokens found in a cache, of those computed or found"],
  ["p50", "decide p50", micros, "time to decode, decide and encode a query"],
  ["p99", "decide p99", micros, "time to decode, decide and encode a query"],
];

/** The row of figures; each keeps its last two minutes as a line. */
export class Figures {
  constructor(list, span) {
    this.span = span;
    this.items = FIGURES.map(([key, title, format, about]) => {
      const value = make("b", {}, NONE);
      const line = draw("polyline");
      const spark = draw("svg", { viewBox: `0 0 ${POINTS - 1} 20`, "aria-hidden": "true" }, line);
      spark.setAttribute("preserveAspectRatio", "none");
      list.append(make("div", { title: about }, make("dt", {}, title), make("dd", {}, value, spark)));
      return { key, format, value, line, past: [] };
    });
  }

  show({ flow, span, status }) {
    say(this.span, span > 0 ? `the last ${span.toFixed(0)} s; lines: 2 minutes` : "");
    const last = status.query_time?.bounds_us?.at(-1);
    for (const { key, format, value, line, past } of this.items) {
      say(value, format(flow[key], last));
      past.push(flow[key] ?? null);
      if (past.length > POINTS) past.shift();
      line.setAttribute("points", points(past, format === percent));
    }
  }
}

/** A line through what is known; shares are drawn on a scale of their own, 0 to 100%. */
function points(past, isShare) {
  const most = isShare ? 1 : Math.max(...past.filter(Number.isFinite), 0) || 1;
  return past
    .map((value, i) => [i + POINTS - past.length, value])
    .filter(([, value]) => value !== null)
    .map(([x, value]) => `${x},${(19 - 18 * Math.min(1, value / most)).toFixed(1)}`)
    .join(" ");
}

/** The policy, those on trial beside it, and the changes so far. */
export class Policy {
  facts = new Map();

  constructor(list, box) {
    this.list = list;
    this.rows = make("tbody");
    const titles = ["changed", "what", "policy", "version", "parameters"];
    const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)));
    const table = make("table", { "aria-label": "Changes of policy, the newest first" });
    table.append(make("thead", {}, head), this.rows);
    box.append(table);
  }

  show({ status }) {
    const facts = [["in force", `${status.policy}, version ${status.policy_version}`]];
    facts.push(["parameters", parameters(status.policy_params) || "none"]);
    facts.push(["canary", trial(status.canary)], ["shadow", trial(status.shadow)]);
    if (status.last_reload_ok === false) facts.push(["last reload", "refused; see the log"]);
    arrange(this.list, facts.map(([name, text]) => this.fact(name, text)));
    const changes = [...(status.changes ?? [])].reverse();
    const key = JSON.stringify(changes);
    if (key !== this.shown) this.rows.replaceChildren(...changes.map(row));
    this.shown = key;
  }

  fact(name, text) {
    if (!this.facts.has(name)) {
      this.facts.set(name, make("div", {}, make("dt", {}, name), make("dd")));
    }
    const fact = this.facts.get(name);
    say(fact.lastChild, text);
    fact.dataset.alarm = String(name === "last reload");
    return fact;
  }
}

function row({ at, what, policy, version, params, share }) {
  const date = new Date(1000 * at);
  const time = `${date.toLocaleDateString("sv")} ${date.toLocaleTimeString("sv")}`; // 2026-01-31 12:34:56
  const part = typeof share === "number" ? `${percent(share)} of the keys  ` : "";
  const cells = [text(what).replace("_", " "), text(policy), text(version), part + parameters(params)];
  const shown = cells.map((cell) => make("td", { title: cell }, cell));
  return make("tr", {}, make("th", { scope: "row" }, time), ...shown);
}

const parameters = (params) =>
  Object.entries(params ?? {}).map(([name, value]) => `${name}=${text(value)}`).join("  ");
const text = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

function trial(role) {
  if (!role) return "none";
  const part = typeof role.share === "number" ? `, ${percent(role.share)} of the keys` : "";
  const params = parameters(role.params);
  return `${text(role.policy)}${part}${params ? `: ${params}` : ""}${compared(role.compared)}`;
}

/** What a shadow would have done, beside what was done. */
function compared(found) {
  if (!found?.requests) return "";
  const share = (tokens) => percent(found.prompt_tokens ? tokens / found.prompt_tokens : 0);
  return (
    `; same rank for ${percent(found.agreed / found.requests)} of ${found.requests} requests, ` +
    `would expect ${share(found.expected_tokens)} of the prompt tokens cached, ` +
    `in fact ${share(found.expected_tokens_in_fact)}`
  );
}

/** One line about the process. */
export function processLine({ status }) {
  const parts = [`version ${text(status.version ?? "?")}`];
  if (typeof status.uptime_seconds === "number") parts.push(`up ${age(status.uptime_seconds)}`);
  if (status.pid) parts.push(`pid ${status.pid}`);
  return parts.join(" · ");
}
