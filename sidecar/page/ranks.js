// The ranks of an instance: a heat grid with one tab stop, and a table that sorts.

import { arrange, make, mark, roving, say } from "./dom.js";
import { age, count, NONE, percent, rate } from "./format.js";
import { isFresh } from "./model.js";

const STEPS = 8; // shades of the grid
const FOLD_AT = 64; // ranks; a longer table is folded at first
const load = (rank) => (typeof rank.load === "number" ? rank.load : null);
const full = () => 1;
// name: [what a cell shows, its text, what is full]
const MEASURES = {
  load: [load, count, (ranks) => Math.max(8, ...ranks.map((rank) => rank.load))],
  waiting: [(rank) => rank.waiting, count, (ranks) => Math.max(4, ...ranks.map((rank) => rank.waiting ?? 0))],
  KV: [(rank) => rank.kv, percent, full],
  "cache hit": [(rank) => rank.hit, percent, full],
  "report age": [(rank) => rank.report_age_seconds, age, (ranks, status) => status.stale_seconds ?? 5],
};
const COLUMNS = [
  ["rank", (rank) => rank.rank, String],
  ["load", load, count],
  ["running", (rank) => rank.running, count],
  ["waiting", (rank) => rank.waiting, count],
  ["in flight", (rank) => rank.in_flight, count],
  ["KV tokens", (rank) => rank.tokens, count],
  ["KV", (rank) => rank.kv, percent],
  ["cache hit", (rank) => rank.hit, percent],
  ["req/s", (rank) => rank.rate, rate],
  ["report age", (rank) => rank.report_age_seconds, age],
];
let instances = 0;

export class Ranks {
  measure = "load";
  order = ["rank", 1];
  cells = new Map();
  rows = new Map();
  chosen = null;
  ranks = [];
  status = {};

  constructor(name) {
    instances += 1;
    this.name = name;
    this.count = make("small");
    this.readout = make("p", { className: "readout" });
    this.scale = make("span", { className: "scale" });
    this.grid = make("div", { className: "grid", role: "group" });
    mark(this.grid, "aria-label", `Ranks of ${name}: arrow keys move from rank to rank`);
    this.refresh = [roving(this.grid, "button", (cell) => this.choose(Number(cell.dataset.rank)))];
    this.grid.addEventListener("pointerover", (event) => {
      const cell = event.target.closest("button");
      if (cell) this.choose(Number(cell.dataset.rank));
    });
    this.table = this.makeTable();
    const tools = make("div", { className: "tools" }, this.makeMeasures(), this.scale);
    this.element = make("div", { className: "ranks" });
    this.element.append(make("h3", {}, "Ranks ", this.count), tools, this.readout, this.grid, this.table);
  }

  makeMeasures() {
    const group = make("fieldset", {}, make("legend", {}, "Shade by"));
    for (const name of Object.keys(MEASURES)) {
      const radio = make("input", { type: "radio", name: `measure-${instances}`, value: name });
      radio.checked = name === this.measure;
      radio.addEventListener("change", () => {
        this.measure = name;
        this.draw();
      });
      group.append(make("label", {}, radio, name));
    }
    return group;
  }

  makeTable() {
    this.heads = COLUMNS.map(([title]) => {
      const button = make("button", { type: "button" }, title);
      button.addEventListener("click", () => this.sort(title));
      return make("th", { scope: "col" }, button);
    });
    this.body = make("tbody");
    this.refresh.push(roving(this.body, "tr", (row) => this.choose(Number(row.dataset.rank))));
    const head = make("thead", {}, make("tr", {}, ...this.heads));
    const table = make("table", { "aria-label": `Ranks of ${this.name}` }, head, this.body);
    const box = make("div", { className: "scroll" }, table);
    const folded = make("details", { className: "table" }, make("summary", {}, "Table"), box);
    folded.addEventListener("toggle", () => this.draw());
    return folded;
  }

  show(ranks, status) {
    if (!this.ranks.length) this.table.open = ranks.length <= FOLD_AT;
    [this.ranks, this.status] = [ranks, status];
    const down = ranks.filter((rank) => !rank.live).length;
    const silent = ranks.filter((rank) => this.stale(rank)).length;
    const words = [`${ranks.length}`, down && `${down} down`, silent && `${silent} without a fresh report`];
    say(this.count, words.filter(Boolean).join(", "));
    this.draw();
  }

  draw() {
    this.drawGrid();
    if (this.table.open) this.drawTable();
    for (const refresh of this.refresh) refresh();
    say(this.readout, this.sentence(this.ranks.find((rank) => rank.rank === this.chosen)));
  }

  stale(rank) {
    return !isFresh(rank, this.status);
  }

  drawGrid() {
    const [value, format, most] = MEASURES[this.measure];
    const top = this.ranks.length ? most(this.ranks, this.status) : 1;
    say(this.scale, `A cell: rank and ${this.measure}; full shade: ${format(top)}`);
    mark(this.grid, "data-many", this.ranks.length > 32 ? "yes" : "no");
    arrange(this.grid, this.ranks.map((rank) => {
      const cell = this.cell(rank.rank);
      const shown = value(rank);
      const heat = shown === null || shown === undefined ? 0 : Math.ceil((STEPS * Math.min(shown, top)) / top);
      mark(cell, "data-heat", rank.live ? heat : "down");
      mark(cell, "data-stale", this.stale(rank) ? "yes" : null);
      say(cell.lastChild, rank.live ? format(shown).replace(" ", "") : "down");
      mark(cell, "aria-label", `rank ${rank.rank}, ${this.measure} ${format(shown)}${rank.live ? "" : ", down"}`);
      return cell;
    }));
  }

  cell(number) {
    if (!this.cells.has(number)) {
      const parts = [make("span", {}, String(number)), make("b")];
      const cell = make("button", { type: "button", tabIndex: -1, "data-rank": number }, ...parts);
      this.cells.set(number, cell);
    }
    return this.cells.get(number);
  }

  drawTable() {
    // A row that moves under the fingers loses the focus: the order stands while one has it.
    if (!this.body.contains(document.activeElement)) {
      arrange(this.body, this.sorted().map((rank) => this.row(rank.rank)));
    }
    for (const rank of this.ranks) {
      const row = this.row(rank.rank);
      COLUMNS.forEach(([, value, format], i) => say(row.children[i], format(value(rank))));
      mark(row, "data-down", rank.live ? null : "yes");
      mark(row.lastChild, "data-alarm", this.stale(rank) ? "true" : null);
    }
    this.heads.forEach((head, i) => {
      const own = COLUMNS[i][0] === this.order[0];
      mark(head, "aria-sort", own ? (this.order[1] > 0 ? "ascending" : "descending") : null);
    });
  }

  row(number) {
    if (!this.rows.has(number)) {
      const cells = COLUMNS.map((column, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }));
      this.rows.set(number, make("tr", { tabIndex: -1, "data-rank": number }, ...cells));
    }
    return this.rows.get(number);
  }

  sort(title) {
    const first = title === "rank" ? 1 : -1; // the busiest first
    this.order = [title, this.order[0] === title ? -this.order[1] : first];
    this.draw();
  }

  sorted() {
    const [title, way] = this.order;
    const value = COLUMNS.find(([name]) => name === title)[1];
    const number = (rank) => value(rank) ?? -Infinity;
    return [...this.ranks].sort((a, b) => way * (number(a) - number(b)) || a.rank - b.rank);
  }

  choose(number) {
    this.chosen = number;
    for (const items of [this.cells, this.rows]) {
      for (const [rank, item] of items) mark(item, "aria-current", rank === number ? "true" : null);
    }
    say(this.readout, this.sentence(this.ranks.find((rank) => rank.rank === number)));
  }

  sentence(rank) {
    if (!rank) return "Point at a rank, or go there with Tab and the arrow keys.";
    const reported = rank.report_age_seconds === null ? "no report" : `report ${age(rank.report_age_seconds)} old`;
    const kv = rank.capacity_tokens ? `KV ${count(rank.tokens)} of ${count(rank.capacity_tokens)} (${percent(rank.kv)})` : `KV ${NONE}`;
    return [
      `rank ${rank.rank}${rank.live ? "" : ", down"}`,
      `load ${count(rank.load)} = ${count(rank.running)} running + ${count(rank.waiting)} waiting + ${count(rank.in_flight)} in flight`,
      kv,
      `cache hit ${percent(rank.hit)}`,
      `${rate(rank.rate)} req/s`,
      reported,
    ].join(" · ");
  }
}
