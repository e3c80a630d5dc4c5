// What the browser remembers for the page. A browser may refuse to store anything: then it is remembered until the page is left.

const memory = new Map();

/** What was kept under a name, or null; `area` gives localStorage or sessionStorage, which may throw. */
export function recall(area, name) {
  try {
    return area().getItem(name) ?? memory.get(name) ?? null;
  } catch {
    return memory.get(name) ?? null;
  }
}

/** Keep a string under a name. */
export function keep(area, name, value) {
  memory.set(name, value);
  try {
    area().setItem(name, value);
  } catch {
    // It stays in memory.
  }
}
