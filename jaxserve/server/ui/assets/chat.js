// The view chat.

/** Called once, with the element to fill, before the view is shown for the first time. */
export function mount(root, context) {
  root.textContent = "chat";
}

/** Called whenever the view is shown (with the rest of the address behind its name) or hidden. */
export function shown(isShown, rest) {}
