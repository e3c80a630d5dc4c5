// The block pool and the steps as the page knows them: typed arrays that events are applied to, without a page.

export const FREE = 0;
export const CACHED = 1;

/** The bytes of a base64 string as elements of `Type`; the stream is little-endian, as every browser's machine is. */
export function decode(text, Type) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  if (bytes.length % Type.BYTES_PER_ELEMENT) throw new RangeError("A list of the stream ends within an element.");
  return new Type(bytes.buffer);
}

/** Owners and reference counts of all blocks, cell i being block i + 1: block 0 is what padding writes to. */
export class Pool {
  constructor(start) {
    this.size = start.num_blocks;
    this.owners = decode(start.owners, Uint16Array);
    this.refs = decode(start.refs, Uint8Array);
    if (this.owners.length !== this.size || this.refs.length !== this.size) {
      throw new RangeError("The stream's first event does not hold as many blocks as it says.");
    }
    this.free = 0;
    this.cached = 0;
    this.shared = 0;
    for (let cell = 0; cell < this.size; cell += 1) this._count(cell, 1);
  }

  get active() {
    return this.size - this.free - this.cached;
  }

  /** Takes over what has changed and returns the cells (Uint32Array). */
  apply({ blocks, owners, refs }) {
    const cells = decode(blocks, Uint32Array);
    const newOwners = decode(owners, Uint16Array);
    const newRefs = decode(refs, Uint8Array);
    if (cells.length !== newOwners.length || cells.length !== newRefs.length) {
      throw new RangeError("The stream's lists of changes differ in length.");
    }
    for (let i = 0; i < cells.length; i += 1) {
      const cell = cells[i];
      if (cell >= this.size) throw new RangeError(`The stream speaks of block ${cell + 1} of ${this.size}.`);
      this._count(cell, -1);
      this.owners[cell] = newOwners[i];
      this.refs[cell] = newRefs[i];
      this._count(cell, 1);
    }
    return cells;
  }

  _count(cell, by) {
    const owner = this.owners[cell];
    if (owner === FREE) this.free += by;
    else if (owner === CACHED) this.cached += by;
    if (this.refs[cell] > 1) this.shared += by;
  }
}

/** One step, as the stream's rows of numbers have it. */
export function toStep([end, seconds, kind, prefill, decoded, verified, padding, rows]) {
  return { end, seconds, kind, prefill, decode: decoded, verify: verified, padding, rows };
}

/** The newest `most` of things. */
export class Recent {
  constructor(most) {
    this._most = most;
    this.items = [];
  }

  add(...items) {
    this.items = this.items.concat(items).slice(-this._most);
  }
}

/** What some steps came to: tokens by kind, share of padding, and the middle and the longest duration. */
export function summarise(steps) {
  const sum = (field) => steps.reduce((total, step) => total + step[field], 0);
  const prefill = sum("prefill");
  const decoded = sum("decode");
  const verify = sum("verify");
  const padding = sum("padding");
  const computed = prefill + decoded + verify + padding;
  const seconds = steps.map((step) => step.seconds).sort((a, b) => a - b);
  return {
    count: steps.length,
    prefill,
    decode: decoded,
    verify,
    padding,
    paddingShare: computed ? padding / computed : 0,
    median: seconds.length ? seconds[seconds.length >> 1] : null,
    longest: seconds.length ? seconds.at(-1) : null,
  };
}
