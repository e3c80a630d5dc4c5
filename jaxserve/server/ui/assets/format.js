// Numbers as people read them. "–" stands for what is not known.

const NONE = "–";
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value == null ? NONE : plain.format(value);
}

/** Three digits, however large: 1.23, 12.0, 123, 1,234; fewer where they say it all: 2.5, 80. */
export function figure(value) {
  if (value == null) return NONE;
  const digits = Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  const isExact = Math.abs(Number(value.toFixed(digits)) - value) <= 1e-9 * Math.abs(value);
  return value.toLocaleString("en", { minimumFractionDigits: isExact ? 0 : digits, maximumFractionDigits: digits });
}

export function percent(share) {
  if (share == null || !Number.isFinite(share)) return NONE;
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${figure(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds > 0 && seconds < 1e-3) return `${figure(1e6 * seconds)} µs`;
  if (seconds < 1) return `${figure(1e3 * seconds)} ms`;
  if (seconds < 120) return `${figure(seconds)} s`;
  if (seconds < 7200) return `${figure(seconds / 60)} min`;
  return `${figure(seconds / 3600)} h`;
}
