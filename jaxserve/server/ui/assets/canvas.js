// What drawings need: pixels as many as the screen has, and the theme's colours.

import { element } from "./dom.js";

/** Fits a canvas' pixels to its size on the screen; returns its context in CSS pixels, or null while it is hidden. */
export function prepare(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const ratio = devicePixelRatio || 1;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0]) canvas.width = pixels[0];
  if (canvas.height !== pixels[1]) canvas.height = pixels[1];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

const probe = element("span", { hidden: true });

/** What CSS variables such as "--accent" come to under the theme that is shown, as canvases take it. */
export function colours(...names) {
  document.body.append(probe);
  const found = names.map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return found;
}

/** Sets a text only where it differs, so that a screen reader's cursor and a selection stay where they are. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
