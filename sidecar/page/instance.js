// One SGLang server: its hook, its decisions by reason, what the hook decided alone, its ranks.

import { arrange, make, mark, say } from "./dom.js";
import { age, count, micros, percent, whole } from "./format.js";
import { groupOf, GROUPS } from "./model.js";
import { Ranks } from "./ranks.js";

const OPEN_AT_FIRST = 8; // instances; more of them are folded

/** All instances, in the order of the answer. */
export class Instances {
  views = new Map();

  constructor(box) {
    this.box = box;
  }

  show(picture) {
    const names = picture.instances.map(({ now }) => now.instance);
    for (const name of this.views.keys()) if (!names.includes(name)) this.views.delete(name);
    picture.instances.forEach((one, index) => {
      const name = one.now.instance;
      if (!this.views.has(name)) this.views.set(name, new Instance(name, index < OPEN_AT_FIRST));
      this.views.get(name).show(one, picture);
    });
    arrange(this.box, names.map((name) => this.views.get(name).element));
  }
}

class Instance {
  constructor(name, open) {
    this.about = make("small");
    this.bar = make("div", { className: "bar", role: "img" });
    this.reasons = new Tally("Decisions by reason", true);
    this.causes = new Tally("Decided by the hook alone, by cause", false);
    this.ranks = new Ranks(name);
    const side = make("div", { className: "side" });
    side.append(this.reasons.title, this.bar, this.reasons.table, this.causes.title, this.causes.table);
    this.element = make(
      "details",
      { open, className: "instance" },
      make("summary", {}, make("h2", {}, name, " ", this.about)),
      make("div", { className: "columns" }, side, this.ranks.element),
    );
  }

  show(one, picture) {
    say(this.about, aboutLine(one));
    if (!this.element.open) return;
    this.drawBar(one.reasons);
    this.reasons.show(one.reasons, one.newReasons, picture.span, groupOf);
    this.causes.show(one.causes, one.newCauses, picture.span, () => "bypass");
    this.ranks.show(one.ranks, picture.status);
  }

  drawBar(reasons) {
    const total = [...reasons.values()].reduce((a, b) => a + b, 0);
    const groups = [...Object.keys(GROUPS), "other"].map((group) => {
      const own = [...reasons].filter(([reason]) => groupOf(reason) === group);
      return [group, own.reduce((n, [, more]) => n + more, 0)];
    });
    const parts = groups.filter(([, n]) => n);
    while (this.bar.children.length < parts.length) this.bar.append(make("i"));
    while (this.bar.children.length > parts.length) this.bar.lastChild.remove();
    parts.forEach(([group, n], i) => {
      mark(this.bar.children[i], "data-group", group);
      this.bar.children[i].style.flexGrow = n / total;
    });
    const words = parts.map(([group, n]) => `${group} ${percent(n / total)}`);
    mark(this.bar, "aria-label", `Since the start: ${words.join(", ") || "nothing"}`);
  }
}

function aboutLine({ now, waits }) {
  const about = now.about ?? {};
  const parts = ["sglang", "hook", "python"].filter((key) => key in about);
  const words = parts.map((key) => `${key} ${about[key]}`);
  if (about.method) words.push(`load-balance-method ${about.method}`);
  const last = now.hook?.round_trip?.bounds_us?.at(-1);
  if (waits[1] !== null) words.push(`hook waits p50 ${micros(waits[0], last)}, p99 ${micros(waits[1], last)}`);
  if (now.hook?.breaker_open) words.push("breaker open: it waits for no answer");
  if (typeof now.last_query_age_seconds === "number") {
    words.push(`last query ${age(now.last_query_age_seconds)} ago`);
  }
  return words.join(" · ");
}

/** Counts by name: the news and the total. */
class Tally {
  rows = new Map();

  constructor(title, keyed) {
    this.title = make("h3", {}, title);
    this.news = make("th", { scope: "col" });
    this.body = make("tbody");
    this.keyed = keyed;
    const head = make("tr", {}, make("th", { scope: "col" }), this.news, make("th", { scope: "col" }, "total"));
    this.table = make("table", { className: "tally", "aria-label": title }, make("thead", {}, head), this.body);
  }

  show(totals, news, span, group) {
    say(this.news, span > 0 ? `${span.toFixed(0)} s` : "");
    const names = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a) || (a < b ? -1 : 1));
    arrange(this.body, names.length ? names.map((name) => this.row(name, group(name))) : [this.none()]);
    for (const name of names) {
      const [, recent, total] = this.rows.get(name).children;
      say(recent, span > 0 ? count(news.get(name) ?? 0) : "");
      say(total, whole(totals.get(name)));
    }
  }

  row(name, group) {
    if (!this.rows.has(name)) {
      const label = make("th", { scope: "row" }, make("i", { "data-group": group }), name);
      if (!this.keyed) label.firstChild.remove();
      this.rows.set(name, make("tr", {}, label, make("td"), make("td")));
    }
    return this.rows.get(name);
  }

  none() {
    this.nothing ??= make("tr", {}, make("td", { colSpan: 3, className: "soft" }, "none"));
    return this.nothing;
  }
}
