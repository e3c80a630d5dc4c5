// How the views ask the server: with the key that the user gave, relative to where the page lies, errors as one readable line.

import { keep, recall } from "./storage.js";

const BASE = new URL("..", import.meta.url);
const STORED_KEY = "jaxserve-key";

/** What the server answered instead of what was asked for. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.name = "ApiError";
    this.status = status;
  }
}

export class Api {
  /** `askKey(message)` resolves to a key that the user gives; `message` says what was wrong with the one before. */
  constructor(askKey) {
    this._askKey = askKey;
    this._asking = null;
  }

  /** A Response whose status is good. Asks for a key where one is needed and tries again. Throws ApiError, or AbortError. */
  async request(path, options = {}) {
    for (;;) {
      const key = recall(() => sessionStorage, STORED_KEY);
      const headers = new Headers(options.headers);
      if (key) headers.set("Authorization", `Bearer ${key}`);
      let response;
      try {
        response = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store" });
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "The server cannot be reached.");
      }
      if (response.ok) return response;
      if (response.status !== 401) throw await failure(response);
      // Another request may have been given a key meanwhile.
      if (recall(() => sessionStorage, STORED_KEY) === key) await this._newKey(key);
    }
  }

  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  post(path, body, options = {}) {
    const headers = { "Content-Type": "application/json" };
    return this.request(path, { ...options, method: "POST", headers, body: JSON.stringify(body) });
  }

  /** The server-sent events of a Response, as { event, data } with data a string. */
  async *events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const parts = (rest + value).split(/\r?\n\r?\n/);
        rest = parts.pop();
        for (const part of parts) {
          const found = parseEvent(part);
          if (found) yield found;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  /** One dialog at a time, however many requests wait for a key. */
  async _newKey(refused) {
    this._asking ??= this._askKey(refused ? "The server does not accept this key." : "").then((key) => {
      keep(() => sessionStorage, STORED_KEY, key);
      this._asking = null;
    });
    await this._asking;
  }
}

function parseEvent(text) {
  let event = "message";
  const data = [];
  for (const line of text.split(/\r?\n/)) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return data.length ? { event, data: data.join("\n") } : null;
}

async function failure(response) {
  let message = "";
  try {
    const body = await response.json();
    message = body.error?.message ?? body.message ?? "";
  } catch {
    // Not JSON: a proxy's page, for instance.
  }
  return new ApiError(response.status, message || `The server answered ${response.status} ${response.statusText}`.trim());
}
