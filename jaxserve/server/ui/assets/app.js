// The shell: which view is shown, the key, the theme. Views know nothing of each other; they get one context.

import { Api } from "./api.js";
import * as calculator from "./calculator.js";
import * as chat from "./chat.js";
import * as live from "./live.js";
import { keep, recall } from "./storage.js";

const VIEWS = { chat, live, calculator };
const mounted = new Set();
const byId = (id) => document.getElementById(id);

const context = {
  /** See api.js: request, json, post, events. */
  api: new Api(askKey),
  /** The cards of GET /v1/models; the first is the base model. Those of adapters name it as their parent. */
  models: [],
  /** A CSS variable of a colour as rgb(…), for canvases: colour("--accent"). It changes with document's "themechange". */
  colour,
  /** Shows what is known of a request, in the view Live. */
  requestLink: (id) => `#live/requests/${encodeURIComponent(id)}`,
  announce,
};

function colour(name) {
  // Only a property that is used resolves light-dark().
  byId("theme").style.outlineColor = `var(${name})`;
  const value = getComputedStyle(byId("theme")).outlineColor;
  byId("theme").style.outlineColor = "";
  return value;
}

/** Says something to who cannot see it. */
function announce(text) {
  byId("status").textContent = text;
}

function askKey(message) {
  const dialog = byId("key");
  const value = byId("key-value");
  byId("key-error").textContent = message;
  value.value = "";
  dialog.showModal();
  value.focus();
  return new Promise((resolve) => {
    dialog.onclose = () => (value.value ? resolve(value.value.trim()) : dialog.showModal());
  });
}

/** #live/requests/ID is the view "live" with the rest ["requests", ID]. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "chat";
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · jaxserve`;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const [other, module] of Object.entries(VIEWS)) {
    const isShown = other === view;
    const root = byId(other);
    root.hidden = !isShown;
    if (isShown && !mounted.has(other)) {
      mounted.add(other);
      module.mount(root, context);
    }
    if (mounted.has(other)) module.shown(isShown, isShown ? rest.map(decoded) : []);
  }
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  keep(() => localStorage, "jaxserve-theme", theme);
  byId("theme").textContent = { system: "Auto theme", light: "Light theme", dark: "Dark theme" }[theme];
  byId("theme").title = "Change the theme";
  document.dispatchEvent(new Event("themechange"));
}

function currentTheme() {
  const stored = recall(() => localStorage, "jaxserve-theme");
  return THEMES.includes(stored) ? stored : "system";
}

async function start() {
  setTheme(currentTheme());
  byId("theme").onclick = () => setTheme(THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length]);
  matchMedia("(prefers-color-scheme: dark)").onchange = () => document.dispatchEvent(new Event("themechange"));
  try {
    context.models = (await context.api.json("v1/models")).data;
    byId("served").textContent = context.models[0].id;
  } catch (error) {
    byId("notice").textContent = error.message;
    byId("notice").hidden = false;
  }
  addEventListener("hashchange", route);
  route();
}

start();
