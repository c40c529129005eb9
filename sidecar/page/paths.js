// The ranks that recent sessions went to, by the hash of their key.

import { arrange, draw, make, mark, roving, say } from "./dom.js";
import { age } from "./format.js";
import { groupOf } from "./model.js";

const RUNS_SHOWN = 8;

export class Paths {
  sessions = [];
  rows = new Map();
  chosen = null;

  constructor({ list, detail, search, count }) {
    Object.assign(this, { list, detail, search, count });
    this.body = make("tbody");
    const titles = ["key hash", "ranks, newest last", "requests", "moves", "last", "instance"];
    const head = make("tr", {}, ...titles.map((title) => make("th", { scope: "col" }, title)));
    list.append(make("table", { "aria-labelledby": "paths-title" }, make("thead", {}, head), this.body));
    this.refresh = roving(this.body, "tr", (row) => this.choose(row.dataset.id));
    this.body.addEventListener("click", (event) => event.target.closest("tr")?.focus());
    search.addEventListener("input", () => this.draw());
    this.none = make("tr", {}, make("td", { colSpan: titles.length, className: "soft" }));
  }

  /** sessions: the answer of /paths; null if this sidecar keeps none. */
  show(sessions) {
    this.absent = sessions === null;
    this.sessions = (sessions ?? []).map(read);
    mark(this.list, "data-servers", new Set(this.sessions.map((one) => one.instance)).size);
    this.draw();
  }

  draw() {
    const prefix = this.search.value.trim().toLowerCase();
    const found = this.sessions.filter((one) => one.hash.toLowerCase().startsWith(prefix));
    const all = this.sessions.length;
    say(this.count, all ? `${prefix ? `${found.length} of ` : ""}the newest ${all}` : "");
    if (!found.length) {
      const why = all ? "no session's hash begins so" : "none yet";
      say(this.none.firstChild, this.absent ? "this sidecar keeps no paths" : why);
    }
    const focused = this.body.contains(document.activeElement) && document.activeElement;
    const rows = found.map((one) => this.row(one));
    // A row that moves loses the focus: the order stands while one has it and is still there.
    if (!rows.includes(focused)) arrange(this.body, rows.length ? rows : [this.none]);
    const ids = new Set(this.sessions.map((one) => one.id));
    for (const id of this.rows.keys()) if (!ids.has(id)) this.rows.delete(id);
    this.refresh();
    this.drawChosen();
  }

  row(one) {
    if (!this.rows.has(one.id)) {
      const cells = [make("th", { scope: "row", className: "hash" }), ...Array.from({ length: 5 }, () => make("td"))];
      this.rows.set(one.id, make("tr", { tabIndex: -1, "data-id": one.id }, ...cells));
    }
    const row = this.rows.get(one.id);
    const [hash, path, requests, moves, last, instance] = row.children;
    say(hash, one.hash);
    if (path.dataset.runs !== one.key) {
      path.dataset.runs = one.key;
      path.replaceChildren(...strip(one.runs));
    }
    say(requests, String(one.requests));
    say(moves, String(Math.max(0, one.runs.length - 1)));
    say(last, `${age(one.runs.at(-1)?.age)} ago`);
    say(instance, one.instance);
    mark(instance, "title", one.instance);
    return row;
  }

  choose(id) {
    this.chosen = id;
    for (const [other, row] of this.rows) mark(row, "aria-current", other === id ? "true" : null);
    this.drawChosen();
  }

  drawChosen() {
    const one = this.sessions.find(({ id }) => id === this.chosen);
    if (!one) {
      this.detail.replaceChildren(make("p", { className: "soft" }, "Choose a session to see its path."));
      this.drawn = null;
      return;
    }
    const key = `${one.id} ${one.key}`;
    if (this.drawn === key) return;
    this.drawn = key;
    this.detail.replaceChildren(make("h3", {}, "Path of ", make("code", {}, one.hash)), chart(one), table(one));
  }
}

/** A session as it came; a run is what went to one rank, one request after the other. */
function read(session) {
  const runs = (session.steps ?? []).map((step) => ({
    rank: step.rank,
    reason: String(step.reason),
    group: groupOf(step.reason),
    length: step.requests ?? 1,
    age: step.age_seconds,
  }));
  const [hash, instance] = [String(session.key_hash), String(session.instance)];
  const key = runs.map(({ rank, length, group }) => `${rank}x${length}${group}`).join();
  const requests = runs.reduce((total, { length }) => total + length, 0);
  return { hash, instance, id: JSON.stringify([instance, hash]), runs, key, requests };
}

/** `3×12 → 5`: where it stayed how long. */
function strip(runs) {
  const shown = runs.slice(-RUNS_SHOWN);
  const parts = runs.length > shown.length ? ["… "] : [];
  for (const { rank, group, length } of shown) {
    const times = length > 1 ? [make("small", {}, `×${length}`)] : [];
    parts.push(make("span", { className: "run", "data-group": group }, String(rank), ...times));
  }
  return parts;
}

/** Ranks from bottom to top, requests from left to right; a dot is a move, in its reason's colour. */
function chart({ runs, hash, requests }) {
  const ranks = [...new Set(runs.map(({ rank }) => rank))].sort((a, b) => b - a);
  const [left, width, line] = [44, 600, 22];
  const height = Math.max(1, ranks.length) * line;
  const scale = (width - left - 8) / Math.max(1, requests);
  const y = (rank) => line / 2 + ranks.indexOf(rank) * line;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "path" });
  mark(svg, "aria-label", `Path of ${hash} over ${ranks.length} ranks; the table has the steps`);
  for (const rank of ranks) {
    svg.append(draw("line", { x1: left, x2: width, y1: y(rank), y2: y(rank) }));
    svg.append(draw("text", { x: left - 10, y: y(rank) + 4 }, String(rank)));
  }
  const [points, dots] = [[], []];
  let x = left;
  for (const { rank, reason, group, length } of runs) {
    const dot = { cx: x, cy: y(rank), r: 4.5, "data-group": group };
    dots.push(draw("circle", dot, draw("title", {}, `rank ${rank}: ${reason}, ${length} requests`)));
    points.push(`${x},${y(rank)}`, `${x + length * scale},${y(rank)}`);
    x += length * scale;
  }
  svg.append(draw("polyline", { points: points.join(" ") }), ...dots);
  return svg;
}

function table({ runs }) {
  const head = ["rank", "why it went there", "requests", "last"].map((title) => make("th", { scope: "col" }, title));
  const rows = [...runs].reverse().map(({ rank, reason, group, length, age: seconds }) =>
    make("tr", {},
      make("td", {}, String(rank)),
      make("th", { scope: "row" }, make("i", { "data-group": group }), reason),
      make("td", {}, String(length)),
      make("td", {}, `${age(seconds)} ago`),
    ));
  const steps = make("table", { "aria-label": "Where it went, the newest first" });
  steps.append(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
  return make("div", { className: "scroll steps", tabIndex: 0, role: "region", "aria-label": "Steps" }, steps);
}
