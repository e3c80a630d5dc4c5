// The stream of GET /debug/live: opened while somebody looks, reopened when it ends, checked before anybody sees it.

const FIRST_DELAY = 500;
const LONGEST_DELAY = 10_000;
/** A stream that is silent for this long is taken for lost: a sleeping laptop's connection never ends by itself. */
const SILENCE = 8_000;

/**
 * Calls handlers.start(data) and handlers.state(data) with the parsed events, and handlers.status(status, detail) when
 * that changes: "paused", "connecting", "connected", or "lost" with why and when it is tried again.
 */
export class LiveFeed {
  constructor(api, handlers, interval = 250) {
    this._api = api;
    this._handlers = handlers;
    this._interval = interval;
    this._isWanted = false;
    this._controller = null;
    this._isPageShown = !document.hidden;
    document.addEventListener("visibilitychange", () => {
      this._isPageShown = !document.hidden;
      this._follow();
    });
  }

  /** Whether anybody looks. Nothing is asked of the server while nobody does, or the tab is in the background. */
  want(isWanted) {
    this._isWanted = isWanted;
    this._follow();
  }

  /** Milliseconds between two states; a stream that is open is opened anew. */
  setInterval(interval) {
    if (interval === this._interval) return;
    this._interval = interval;
    this._stop();
    this._follow();
  }

  _follow() {
    const isWanted = this._isWanted && this._isPageShown;
    if (isWanted && this._controller === null) this._run();
    if (!isWanted && this._controller !== null) {
      this._stop();
      this._handlers.status("paused", "");
    }
  }

  _stop() {
    this._controller?.abort();
    this._controller = null;
  }

  async _run() {
    const controller = new AbortController();
    this._controller = controller;
    let delay = FIRST_DELAY;
    while (!controller.signal.aborted) {
      this._handlers.status("connecting", "");
      const why = await this._watch(controller.signal, () => (delay = FIRST_DELAY));
      if (controller.signal.aborted) return;
      // Many pages that lost one server must not all come back in the same moment.
      const wait = delay * (0.75 + 0.5 * Math.random());
      this._handlers.status("lost", `${why} Trying again in ${Math.max(1, Math.round(wait / 1000))} s.`);
      delay = Math.min(2 * delay, LONGEST_DELAY);
      await pause(wait, controller.signal);
    }
  }

  /** Follows one stream to its end and returns why it has ended. */
  async _watch(outer, onState) {
    const inner = new AbortController();
    const end = () => inner.abort();
    outer.addEventListener("abort", end);
    let alarm = 0;
    let hasStarted = false;
    try {
      const response = await this._api.request(`debug/live?interval=${this._interval}`, { signal: inner.signal });
      // Not before: whoever is asked for a key may think it over.
      alarm = setTimeout(end, SILENCE);
      for await (const { event, data } of this._api.events(response)) {
        if (outer.aborted) return "";
        clearTimeout(alarm);
        alarm = setTimeout(end, SILENCE + this._interval);
        if (event === "start") {
          this._handlers.start(JSON.parse(data));
          this._handlers.status("connected", "");
          hasStarted = true;
        } else if (event === "state" && hasStarted) {
          this._handlers.state(JSON.parse(data));
          onState();
        }
      }
      return "The server ended the stream.";
    } catch (error) {
      if (error.name === "AbortError") return "The server fell silent.";
      if (error instanceof TypeError && hasStarted) return "The connection broke.";
      return error.message;
    } finally {
      clearTimeout(alarm);
      outer.removeEventListener("abort", end);
      inner.abort();
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()));
  });
}
