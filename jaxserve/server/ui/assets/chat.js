// The view Chat: a conversation that is sent whole with every question, one answer at a time, drawn as it streams.

import { AnswerMessage, userMessage } from "./chat_message.js";
import { ChatSettings } from "./chat_settings.js";
import { element } from "./dom.js";

const EXAMPLES = ["Name three rivers.", "Explain paging to a child.", "Write a function that reverses a list, in Python."];

let chat = null;

/** Called once, with the element to fill, before the view is shown for the first time. */
export function mount(root, context) {
  chat = new Chat(root, context);
}

/** Called whenever the view is shown or hidden. */
export function shown(isShown) {
  if (isShown) chat.refresh();
}

class Chat {
  constructor(root, context) {
    this._context = context;
    /** Messages as they are sent, each with its element: [{ role, content, node }]. */
    this._turns = [];
    this._running = null;
    this._editing = null;
    this._settings = new ChatSettings();
    this._settings.setModels(context.models);
    this._build(root);
    this._clear();
  }

  /** Adapters come and go while the page is open. */
  async refresh() {
    this._focus();
    try {
      this._settings.setModels((await this._context.api.json("v1/models")).data);
    } catch {
      // The list stays as it was; a question will tell what is wrong.
    }
  }

  _build(root) {
    this._log = element("div", { class: "log", role: "log", "aria-label": "Conversation", tabIndex: 0 });
    this._input = element("textarea", { id: "chat-input", rows: 1, placeholder: "Ask something", "aria-label": "Your message" });
    this._input.oninput = () => this._fit();
    this._input.onkeydown = (event) => this._onKey(event);
    this._send = element("button", { type: "submit", class: "primary send" }, "Send");
    const fresh = element("button", { type: "button", class: "quiet small", onclick: () => this._clear() }, "New chat");
    this._editNote = element("p", { class: "edit-note", hidden: true }, "Later messages will be replaced. ");
    const cancel = element("button", { type: "button", class: "quiet small", onclick: () => this._edit(null) }, "Cancel");
    this._editNote.append(cancel);
    const composer = element("form", { class: "composer" }, this._input, this._send);
    composer.onsubmit = (event) => {
      event.preventDefault();
      if (this._running) this._running.abort();
      else this._submit();
    };
    this._panel = element("details", { class: "settings" }, element("summary", {}, "Settings"), this._settings.root);
    this._panel.open = matchMedia("(min-width: 961px)").matches;
    const below = element("p", { class: "below" }, element("span", {}, "Enter sends, Shift+Enter begins a line, Escape stops."), fresh);
    root.append(element("div", { class: "talk" }, this._log, this._editNote, composer, below), this._panel);
  }

  _onKey(event) {
    if (event.key === "Escape" && this._running) this._running.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this._running) this._submit();
  }

  /** The field is as high as its text, up to a limit that the style sets. */
  _fit() {
    this._input.style.height = "auto";
    this._input.style.height = `${this._input.scrollHeight + 2}px`;
  }

  _clear() {
    this._running?.abort();
    this._edit(null);
    this._turns = [];
    const examples = EXAMPLES.map((text) => {
      const button = element("button", { type: "button" }, text);
      button.onclick = () => this._submit(text);
      return button;
    });
    this._log.replaceChildren(
      element(
        "div",
        { class: "welcome" },
        element("h2", {}, "Ask the model something"),
        element("div", { class: "examples" }, ...examples),
      ),
    );
    this._focus();
  }

  /** Not where that brings up a keyboard over half of the screen. */
  _focus() {
    if (matchMedia("(hover: hover)").matches) this._input.focus({ preventScroll: true });
  }

  /** Changes an earlier message of the user's; null changes none. */
  _edit(turn) {
    this._editing = turn;
    this._editNote.hidden = turn === null;
    this._input.value = turn?.content ?? "";
    this._fit();
    this._input.focus();
  }

  _submit(text = this._input.value) {
    if (this._running || !text.trim()) return;
    if (!this._settings.root.checkValidity()) {
      this._panel.open = true;
      this._settings.check();
      return;
    }
    if (this._turns.length === 0) this._log.replaceChildren();
    if (this._editing) this._cut(this._turns.indexOf(this._editing));
    this._edit(null);
    const turn = { role: "user", content: text };
    turn.node = userMessage(text, () => this._running || this._edit(turn));
    this._add(turn);
    this._answer();
  }

  _add(turn) {
    this._turns.push(turn);
    this._log.append(turn.node);
    this._log.scrollTop = this._log.scrollHeight;
  }

  /** Forgets messages from one on. */
  _cut(from) {
    for (const { node } of this._turns.splice(from)) node.remove();
  }

  _again(turn) {
    if (this._running) return;
    this._cut(this._turns.indexOf(turn));
    this._answer();
  }

  async _answer() {
    // An answer that failed says nothing: it is not sent, nor is its question, as roles must take turns.
    const isSent = ({ content }, i) => content && this._turns[i + 1]?.content !== "";
    const said = this._turns.filter(isSent).map(({ role, content }) => ({ role, content }));
    const turn = { role: "assistant", content: "" };
    const links = { onAgain: () => this._again(turn), requestLink: this._context.requestLink };
    const message = new AnswerMessage(this._settings.model, links);
    turn.node = message.root;
    this._add(turn);
    const running = (this._running = new AbortController());
    this._send.textContent = "Stop";
    const figures = { sentAt: performance.now(), firstToken: null, lastToken: null, usage: null, finishReason: null, stopped: false, id: null };
    const drawing = new Drawing(this._log, message);
    try {
      await this._stream(this._settings.body(said), running.signal, message, figures, drawing);
      drawing.end(() => message.finish(figures));
      this._context.announce("Answer finished");
    } catch (error) {
      if (error.name === "AbortError") {
        drawing.end(() => message.finish({ ...figures, stopped: true }));
        this._context.announce("Stopped");
      } else {
        drawing.end(() => message.fail(explained(error)));
      }
    } finally {
      turn.content = message.text;
      if (this._running === running) {
        this._running = null;
        this._send.textContent = "Send";
      }
    }
  }

  async _stream(body, signal, message, figures, drawing) {
    const { api } = this._context;
    const options = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    const response = await api.post("v1/chat/completions", { ...body, ...options }, { signal });
    for await (const { data } of api.events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      figures.id ??= chunk.id;
      figures.usage = chunk.usage ?? figures.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      figures.finishReason = choice.finish_reason ?? figures.finishReason;
      const { content, reasoning } = choice.delta;
      if (!content && !reasoning) continue;
      figures.lastToken = performance.now() - figures.sentAt;
      figures.firstToken ??= figures.lastToken;
      message.add(content ?? "", reasoning ?? "");
      drawing.soon();
    }
    throw new Error("The answer was cut off: the connection to the server is gone.");
  }
}

/** Draws an answer at most once a frame, and seldom enough that a long one leaves time for all else. */
class Drawing {
  constructor(log, message) {
    this._log = log;
    this._message = message;
    this._pending = false;
    this._ended = false;
    this._notBefore = 0;
  }

  soon() {
    if (this._pending) return;
    this._pending = true;
    const wait = this._notBefore - performance.now();
    if (wait > 0) setTimeout(() => requestAnimationFrame(() => this._draw()), wait);
    else requestAnimationFrame(() => this._draw());
  }

  /** `change` is the last one. */
  end(change) {
    this._ended = true;
    this._follow(change);
  }

  _draw() {
    this._pending = false;
    if (this._ended) return;
    const began = performance.now();
    this._follow(() => this._message.show());
    this._notBefore = performance.now() + 3 * (performance.now() - began);
  }

  /** Who reads the end keeps seeing the end; who scrolled up stays there. */
  _follow(change) {
    const log = this._log;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    change();
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
}

function explained(error) {
  if (!/no chat template/i.test(error.message)) return error.message;
  return "This model has no chat template, so it cannot chat. Let it go on with a text by POST /v1/completions, or start the server with --chat-template FILE.";
}
