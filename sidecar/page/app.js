// Asks the sidecar once a second while the page is to be seen, and shows what it tells.

import { say } from "./dom.js";
import { age } from "./format.js";
import { Instances } from "./instance.js";
import { History, isFresh, isStatus } from "./model.js";
import { Paths } from "./paths.js";
import { Figures, Policy, processLine } from "./policy.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 5000;
const PATHS_EVERY = 3; // rounds: paths change slowly and are the larger answer
const THEMES = ["auto", "light", "dark"];
const at = (id) => document.getElementById(id);

const figures = new Figures(at("figures"), at("span"));
const policy = new Policy(at("policy"), at("changes"));
const instances = new Instances(at("instances"));
const paths = new Paths({
  list: at("paths-list"),
  detail: at("path"),
  search: at("prefix"),
  count: at("paths-count"),
});
const history = new History();
let [rounds, lastAnswer, timer] = [0, null, null];

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`it answers ${answer.status}`);
  return answer.json();
}

function stateOf({ status }) {
  if (!status.instances.length) return ["waiting", "waiting: no SGLang server has connected"];
  const ranks = status.instances.flatMap((one) => one.ranks ?? []);
  if (!ranks.some((rank) => isFresh(rank, status))) return ["warn", "connected, but no rank reports its load"];
  if (status.instances.some((one) => one.hook?.breaker_open)) return ["warn", "on, but a hook waits for no answers"];
  const n = status.instances.length;
  return ["on", `on: ${n} ${n === 1 ? "server" : "servers"}, ${ranks.length} ranks`];
}

function show(status) {
  const picture = history.add(performance.now() / 1000, status);
  const [state, text] = stateOf(picture);
  at("state").dataset.state = state;
  say(at("state"), text);
  say(at("process"), processLine(picture));
  figures.show(picture);
  policy.show(picture);
  instances.show(picture);
}

function trouble(error) {
  const known = { TimeoutError: `none within ${TIMEOUT_MS / 1000} s`, TypeError: "it cannot be reached" };
  const why = known[error.name] ?? error.message;
  at("state").dataset.state = "gone";
  say(at("state"), "gone");
  say(at("trouble"), `No answer from the sidecar: ${why}. SGLang serves on without it. Shown is what was last known.`);
  say(at("since"), lastAnswer === null ? "" : `Last answer ${age((performance.now() - lastAnswer) / 1000)} ago.`);
}

async function round() {
  try {
    const status = await ask("status");
    if (!isStatus(status)) throw new Error("what answers is no sidecar");
    lastAnswer = performance.now();
    show(status);
    if (rounds % PATHS_EVERY === 0) paths.show(await ask("paths"));
    rounds += 1;
    gone(false);
  } catch (error) {
    trouble(error);
    gone(true);
  }
  performance.mark("round");
  timer = document.hidden ? null : setTimeout(round, INTERVAL_MS);
}

function gone(is) {
  at("banner").hidden = !is;
  at("main").classList.toggle("old", is);
}

function chooseTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  say(at("theme"), `Theme: ${theme}`);
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // No storage: it lasts as long as the page.
  }
}

at("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  chooseTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
say(at("theme"), `Theme: ${document.documentElement.dataset.theme ?? "auto"}`);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && timer === null) {
    timer = 0;
    round();
  }
});
timer = 0;
round();
