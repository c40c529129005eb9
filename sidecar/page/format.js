// Numbers as text; the same rules as sidecar/top/text.py.

const SIZES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
export const NONE = "–";

const known = (value) => typeof value === "number" && !Number.isNaN(value);

/** 999, 1.0k, 812k, 1.1M */
export function count(value) {
  if (!known(value)) return NONE;
  for (const [size, suffix] of SIZES) {
    if (value >= size * 0.9995) {
      const scaled = value / size;
      return scaled.toFixed(scaled >= 99.95 ? 0 : 1) + suffix;
    }
  }
  return value.toFixed(0);
}

/** Every digit, in groups of three. */
export const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : NONE);

/** A second: 0.3, 12.5, 1.2k */
export function rate(value) {
  if (!known(value)) return NONE;
  return value < 99.95 ? value.toFixed(1) : count(value);
}

/** A share of 1: 0.4%, 87% */
export function percent(share) {
  if (!known(share)) return NONE;
  const value = 100 * share;
  return (value > 0 && value < 9.95 ? value.toFixed(1) : value.toFixed(0)) + "%";
}

/** Microseconds: 12 µs, 3.4 ms; beyond the last bucket: >20 ms */
export function micros(value, last) {
  if (value === Infinity) return ">" + micros(last);
  if (!known(value)) return NONE;
  if (value < 999.5) return value.toFixed(0) + " µs";
  return Number((value / 1000).toPrecision(3)) + " ms";
}

/** An age: 0.2 s, 59 s, 12 min, 3 h, 4 d */
export function age(value) {
  if (!known(value)) return NONE;
  for (const [size, suffix] of [[86400, " d"], [3600, " h"], [60, " min"]]) {
    if (value >= 2 * size) return (value / size).toFixed(0) + suffix;
  }
  return value.toFixed(value < 9.95 ? 1 : 0) + " s";
}
