// The two pictures: one column per session, and the device's memory as one bar.

import { colours, prepare } from "./canvas.js";
import { element } from "./dom.js";

const GAP_FROM = 5;

/**
 * Columns as high as what is reserved for each session, filled as high as its context. Sessions past `fits` are pale.
 *
 * reservedOf(context): tokens that a session of this context has a place for. unit: tokens of a block, whose borders are
 * drawn where there is room, or 0.
 */
export function drawSessions(canvas, { contexts, fits, top, reservedOf, unit }) {
  const prepared = prepare(canvas);
  if (prepared === null) return;
  const { context: pen, width, height } = prepared;
  const [used, waste, line, surface] = colours("--series-1", "--series-2", "--line", "--surface");
  const column = width / contexts.length;
  const gap = column >= GAP_FROM ? Math.min(3, column / 5) : 0;
  const scale = height / top;
  contexts.forEach((length, i) => {
    const left = i * column;
    const breadth = Math.max(column - gap, 0.5);
    const reserved = reservedOf(length) * scale;
    pen.globalAlpha = i < fits ? 1 : 0.22;
    pen.fillStyle = waste;
    pen.fillRect(left, height - reserved, breadth, reserved);
    pen.fillStyle = used;
    pen.fillRect(left, height - length * scale, breadth, length * scale);
    if (unit * scale >= 4 && breadth >= 4) {
      pen.globalAlpha = 1;
      pen.fillStyle = surface;
      for (let y = unit; y < reservedOf(length); y += unit) pen.fillRect(left, height - y * scale, breadth, 1);
    }
  });
  pen.globalAlpha = 1;
  pen.fillStyle = line;
  pen.fillRect(0, height - 1, width, 1);
}

/** parts: [{ label, class, bytes, text }]; those without bytes are left out. `all`: what the bar's width stands for. */
export function memoryBar(bar, parts, all) {
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", parts.map(({ label, text }) => `${label}: ${text}`).join(", "));
  bar.replaceChildren(
    ...parts
      .filter((part) => part.bytes > 0)
      .map((part) => {
        const piece = element("span", { class: `piece ${part.class}`, title: `${part.label}: ${part.text}` });
        piece.style.width = `${Math.min(100, (100 * part.bytes) / all)}%`;
        return piece;
      }),
  );
}
