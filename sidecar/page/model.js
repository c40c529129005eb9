// What an answer means: rates and shares from the differences of two answers. No document here.
// The same rules as sidecar/top/rates.py.

export const WINDOW_SECONDS = 10;
export const GROUPS = {
  hit: ["affinity_hit", "token_affinity_hit", "prefix_hit", "replica_hit"],
  placed: ["placed"],
  spill: ["spill", "stale_skip", "token_spill", "token_stale_skip", "prefix_spill"],
  "no affinity": ["fallback", "round_robin", "least_requests", "least_tokens"],
  error: ["policy_error"],
};
const GROUP_OF = new Map(
  Object.entries(GROUPS).flatMap(([group, reasons]) => reasons.map((reason) => [reason, group])),
);
export const groupOf = (reason) => GROUP_OF.get(reason) ?? "other";

/** Whether it is what a sidecar answers. */
export const isStatus = (status) =>
  typeof status?.policy === "string" && Array.isArray(status.instances);

/** Whether the rank has reported lately; null, for never, is less than any number to JavaScript. */
export const isFresh = ({ report_age_seconds: age }, { stale_seconds: most = 5 }) =>
  typeof age === "number" && age <= most;

/** What a counter counted in between; all of it if it began anew. */
export const since = (before, now) => (now >= before ? now - before : now);
const share = (part, whole) => (whole ? part / whole : null);
const sum = (counts) => [...counts.values()].reduce((total, count) => total + count, 0);

/** reason -> requests, whichever policy decided. */
export function reasonsOf(instance) {
  const reasons = new Map();
  for (const counts of Object.values(instance?.decisions ?? {})) {
    for (const [reason, count] of Object.entries(counts)) {
      reasons.set(reason, (reasons.get(reason) ?? 0) + count);
    }
  }
  return reasons;
}

const causesOf = (instance) => new Map(Object.entries(instance?.bypassed ?? {}));

function difference(before, after) {
  return new Map([...after].map(([name, n]) => [name, since(before.get(name) ?? 0, n)]));
}

/** The q-quantile of a histogram's news, as Prometheus's histogram_quantile; null: none. */
export function quantile(before, after, q) {
  const bounds = after?.bounds_us ?? [];
  const old = before?.counts ?? [];
  const counts = (after?.counts ?? []).map((count, i) => since(old[i] ?? 0, count));
  const total = counts.reduce((a, b) => a + b, 0);
  if (!total || counts.length !== bounds.length + 1) return null;
  let seen = 0;
  for (let i = 0; i < counts.length; i += 1) {
    if (seen + counts[i] >= q * total) {
      if (i === bounds.length) return Infinity;
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (q * total - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return null;
}

/** The answers of the last WINDOW_SECONDS and the one before them. */
export class History {
  samples = [];

  /** Take in the answer of time `at`, seconds; what is to be seen then. */
  add(at, status) {
    const last = this.samples.at(-1);
    if (last && (restarted(last.status, status) || at - last.at > 3 * WINDOW_SECONDS)) {
      this.samples = [];
    }
    this.samples.push({ at, status });
    while (this.samples.length > 2 && at - this.samples[1].at >= WINDOW_SECONDS) {
      this.samples.shift();
    }
    return picture(this.samples[0], { at, status });
  }
}

const restarted = (before, after) =>
  before.pid !== after.pid || after.uptime_seconds < before.uptime_seconds;

function picture(first, last) {
  const { status } = last;
  const span = last.at - first.at;
  const before = new Map(first.status.instances.map((one) => [one.instance, one]));
  const instances = status.instances.map((one) => seen(before.get(one.instance), one, span));
  return { status, span, instances, flow: flow(first.status, status, instances, span) };
}

/** One instance: totals, the news of the window, its ranks. */
function seen(was, now, span) {
  const reasons = reasonsOf(now);
  const causes = causesOf(now);
  const old = new Map((was?.ranks ?? []).map((rank) => [rank.rank, rank]));
  return {
    now,
    reasons,
    causes,
    newReasons: difference(reasonsOf(was), reasons),
    newCauses: difference(causesOf(was), causes),
    waits: [0.5, 0.99].map((q) => quantile(was?.hook?.round_trip, now.hook?.round_trip, q)),
    ranks: (now.ranks ?? []).map((rank) => withFlow(old.get(rank.rank), rank, span)),
  };
}

function withFlow(was, now, span) {
  const admitted = since(was?.admitted_tokens ?? 0, now.admitted_tokens ?? 0);
  const cached = since(was?.cached_tokens ?? 0, now.cached_tokens ?? 0);
  const flows = was && span > 0;
  return {
    ...now,
    kv: now.capacity_tokens ? now.tokens / now.capacity_tokens : null,
    rate: flows ? since(was.sent, now.sent) / span : null,
    cached: flows ? cached : 0,
    admitted: flows ? admitted : 0,
    hit: flows ? share(Math.min(cached, admitted), admitted) : null,
  };
}

function flow(before, after, instances, span) {
  if (!(span > 0)) return {};
  const groups = new Map();
  let [fallback, bypassed, cached, admitted] = [0, 0, 0, 0];
  for (const { newReasons, newCauses, ranks } of instances) {
    for (const [reason, n] of newReasons) {
      groups.set(groupOf(reason), (groups.get(groupOf(reason)) ?? 0) + n);
    }
    fallback += newReasons.get("fallback") ?? 0;
    bypassed += sum(newCauses);
    for (const rank of ranks) [cached, admitted] = [cached + rank.cached, admitted + rank.admitted];
  }
  const decided = sum(groups);
  return {
    decisions: decided / span,
    hit: share(groups.get("hit") ?? 0, decided),
    spill: share(groups.get("spill") ?? 0, decided),
    fallback: share(fallback, decided),
    bypass: share(bypassed, decided + bypassed),
    cached: share(Math.min(cached, admitted), admitted),
    p50: quantile(before.query_time, after.query_time, 0.5),
    p99: quantile(before.query_time, after.query_time, 0.99),
  };
}
