// What a model says, as elements. Three walls between a model and the page: HTML in the text is shown as text, what marked
// makes of the rest goes through DOMPurify with a short list of tags, and the page's policy runs no script but its own.

import { copyButton, element } from "./dom.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const escaped = (text) =>
  text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

const markdown = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // Nothing is fetched from elsewhere because a model says so; who wants to see a picture may follow the link.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const ALLOWED = {
  ALLOWED_TAGS:
    "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Shows a text as Markdown, or as it is. A text that grows is rendered anew only from the part that changed. */
export class MarkdownView {
  constructor() {
    this.root = element("div", { class: "markdown" });
    this._parts = [];
  }

  show(text) {
    let tokens;
    try {
      tokens = markdown.lexer(text).filter((token) => token.type !== "space" && token.type !== "def");
    } catch {
      // So deeply nested that the parser gives up.
      tokens = [{ type: "plain", raw: text }];
    }
    let same = 0;
    while (same < Math.min(tokens.length, this._parts.length) && this._parts[same].raw === tokens[same].raw) same++;
    for (const { node } of this._parts.splice(same)) node.remove();
    for (const token of tokens.slice(same)) {
      const node = rendered(token);
      this.root.append(node);
      this._parts.push({ raw: token.raw, node });
    }
  }
}

function rendered(token) {
  const node = element("div", { class: "part" });
  try {
    node.append(DOMPurify.sanitize(markdown.parser([token]), ALLOWED));
  } catch {
    node.append(token.raw);
  }
  for (const link of node.querySelectorAll("a[href]")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of node.querySelectorAll("table")) {
    const wide = element("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(wide);
    wide.append(table);
  }
  for (const pre of node.querySelectorAll("pre")) frame(pre);
  return node;
}

/** A bar over a piece of code: its language and a button. */
function frame(pre) {
  const code = pre.querySelector("code");
  const language = /(?:^|\s)language-(\S+)/.exec(code?.className ?? "")?.[1] ?? "";
  code?.removeAttribute("class");
  const framed = element("div", { class: "code" });
  pre.replaceWith(framed);
  pre.tabIndex = 0;
  const bar = element("div", { class: "code-bar" }, element("span", {}, language || "code"));
  bar.append(copyButton(() => pre.textContent.replace(/\n$/, ""), "Copy this code"));
  framed.append(bar, pre);
}
