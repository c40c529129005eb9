// The few things that every part needs of the document. Text is always set as text, never as HTML.

/** An element with properties, attributes (a name with a dash, role, scope) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set the text if it is another: an untouched node costs no layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute if it is another; null removes it. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Make the children of `parent` these, in this order, touching only what differs. */
export function arrange(parent, children) {
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > children.length) parent.lastChild.remove();
}

/**
 * One tab stop for many items: arrows, Home and End move among the children of `box` that match.
 * chosen: told of the item that has the focus.
 */
export function roving(box, selector, chosen) {
  const items = () => [...box.querySelectorAll(selector)];
  const stop = (item) => {
    for (const other of box.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    item.tabIndex = 0;
  };
  box.addEventListener("focusin", (event) => {
    const item = event.target.closest(selector);
    if (!item) return;
    stop(item);
    chosen(item);
  });
  box.addEventListener("keydown", (event) => {
    const all = items();
    const at = all.indexOf(event.target.closest(selector));
    const to = target(event.key, all, at);
    if (at < 0 || to === null) return;
    event.preventDefault();
    all[Math.max(0, Math.min(all.length - 1, to))].focus();
  });
  /** To be called when items came or went. */
  return () => {
    if (!box.querySelector('[tabindex="0"]')) {
      const first = box.querySelector(selector);
      if (first) first.tabIndex = 0;
    }
  };
}

function target(key, all, at) {
  const row = all.findIndex((item) => item.offsetTop !== all[0].offsetTop);
  const columns = row < 0 ? all.length : row;
  const line = columns === all.length ? 1 : columns;
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: line, ArrowUp: -line };
  if (key in steps) {
    const to = at + steps[key];
    return to < 0 || to >= all.length ? at : to;
  }
  return { Home: 0, End: all.length - 1 }[key] ?? null;
}
