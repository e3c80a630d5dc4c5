// Elements in one expression. Text is always text: no string given here is ever read as HTML.

/** element("button", { class: "quiet", onclick: … }, "Copy"). Properties where the element has them, else attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(text, label) {
  const button = element("button", { type: "button", class: "quiet small", title: label, "aria-label": label }, "Copy");
  button.onclick = async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

/** The old way: pages over plain HTTP from another host have no clipboard. */
function copiedBySelection(text) {
  const area = element("textarea", { class: "unseen", value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
