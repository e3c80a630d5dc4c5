// One message of a chat as it is shown: a bubble of the user's, or an answer with what it cost.

import { copyButton, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** A message of the user's. `onEdit` is called to change it. */
export function userMessage(text, onEdit) {
  const edit = element("button", { type: "button", class: "quiet small", onclick: onEdit, "aria-label": "Edit this message" }, "Edit");
  return element(
    "article",
    { class: "message user", "aria-label": "You" },
    element("div", { class: "bubble" }, text),
    element("div", { class: "actions" }, edit, copyButton(() => text, "Copy this message")),
  );
}

/** An answer, which grows until `finish` or `fail`. */
export class AnswerMessage {
  constructor(model, { onAgain, requestLink }) {
    this.text = "";
    this._reasoning = "";
    this._requestLink = requestLink;
    this._view = new MarkdownView();
    this._thoughts = element("div", { class: "thoughts-text" });
    this._thinking = element("details", { class: "thoughts", hidden: true }, element("summary", {}, "Thoughts"), this._thoughts);
    this._error = element("p", { class: "error" });
    this._stats = element("ul", { class: "stats", "aria-label": "Figures of this answer" });
    const again = element("button", { type: "button", class: "quiet small again", onclick: onAgain, "aria-label": "Answer once more" }, "Again");
    this._actions = element("div", { class: "actions", hidden: true }, copyButton(() => this.text, "Copy this answer"), again);
    this.root = element(
      "article",
      { class: "message answer waiting", "aria-label": `Answer of ${model}`, "aria-busy": "true" },
      element("p", { class: "who" }, model),
      this._thinking,
      this._view.root,
      this._error,
      this._stats,
      this._actions,
    );
  }

  /** More of the answer; `show` draws it. */
  add(text, reasoning) {
    this.text += text;
    this._reasoning += reasoning;
  }

  show() {
    if (this.text || this._reasoning) this.root.classList.remove("waiting");
    this._view.show(this.text);
    this._thinking.hidden = !this._reasoning;
    this._thinking.open = !this.text;
    if (this._thoughts.textContent !== this._reasoning) this._thoughts.textContent = this._reasoning;
  }

  finish(figures) {
    this._end();
    if (!this.text && !this._reasoning) this._view.root.append(element("p", { class: "muted" }, "(an empty answer)"));
    this._stats.replaceChildren(...statistics(figures).map((text) => element("li", {}, text)));
    if (figures.id) {
      this._stats.append(element("li", {}, element("a", { href: this._requestLink(figures.id) }, "Details")));
    }
  }

  fail(message) {
    this._end();
    this._error.textContent = message;
  }

  _end() {
    this.show();
    this.root.classList.remove("waiting");
    this.root.setAttribute("aria-busy", "false");
    this._actions.hidden = false;
  }
}

/** Times in milliseconds since the request was sent; `usage` is that of the last event that had one. */
function statistics({ firstToken, lastToken, usage, finishReason, stopped }) {
  const texts = [];
  if (firstToken !== null) texts.push(`First token ${milliseconds(firstToken)}`);
  const count = usage?.completion_tokens ?? 0;
  if (count > 1 && lastToken > firstToken) {
    texts.push(`${(((count - 1) / (lastToken - firstToken)) * 1000).toFixed(1)} tokens/s`);
  }
  if (usage) {
    texts.push(plural(count, "token"));
    texts.push(`${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached`);
    const drafts = usage.completion_tokens_details;
    if (drafts) {
      const accepted = drafts.accepted_prediction_tokens;
      texts.push(`${accepted} of ${plural(accepted + drafts.rejected_prediction_tokens, "draft")} accepted`);
    }
  }
  if (stopped) texts.push("Stopped");
  else if (finishReason === "length") texts.push("Cut at the limit of tokens");
  return texts;
}

const milliseconds = (value) => (value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(2)} s`);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
