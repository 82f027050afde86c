// Makes elements. Text becomes text nodes, and attributes become attributes: this module never parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else if (name === "value" || name === "checked" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** An HTML element: h("a", {href: "#/", class: "x", onclick: f}, "text", child, …). */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** The same for SVG. */
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Replace the children of an element. Focus (by `data-key`) and scroll positions (by `data-scroll`) are kept. */
export function swap(container, ...children) {
  const held = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = [...container.querySelectorAll("[data-scroll]")].map((e) => [e.dataset.scroll, e.scrollLeft, e.scrollTop]);
  container.replaceChildren(...children.flat(Infinity).filter((c) => c !== undefined && c !== null && c !== false));
  for (const [key, left, top] of scrolled) {
    const again = container.querySelector(`[data-scroll="${CSS.escape(key)}"]`);
    if (again) [again.scrollLeft, again.scrollTop] = [left, top];
  }
  if (held !== undefined) container.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}

let ids = 0;
/** A unique id. */
export const uid = (prefix) => `${prefix}-${++ids}`;

/** A labelled form field. Screen readers read `hint` with it. */
export function field(label, control, hint) {
  control.id ||= uid("f");
  const note = hint && h("small", { id: `${control.id}-hint`, class: "hint" }, hint);
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, note);
}

/** A table. `columns`: text, or {text, class}; `rows`: arrays of cells, or `tr` elements. `caption` names the table for screen readers. */
export function table(caption, columns, rows, empty = "Nothing here.") {
  const heads = columns.map((c) => h("th", { scope: "col", class: c.class }, c.text ?? c));
  const body = rows.map((r) =>
    r instanceof Node ? r : h("tr", {}, r.map((cell, i) => h("td", { class: columns[i]?.class }, cell))),
  );
  if (!body.length) body.push(h("tr", {}, h("td", { colspan: columns.length, class: "empty" }, empty)));
  return h(
    "div",
    { class: "scroll", "data-scroll": caption, tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "sr" }, caption), h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)),
  );
}

/** A small label of a state or a class. */
export const chip = (text, kind) => h("span", { class: `chip ${kind ?? ""}` }, text);

/** A bar for a share from 0 to 1, with its text next to it. */
export function meter(share, text, label) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
  return h(
    "span",
    { class: "meter" },
    h(
      "span",
      {
        class: "track",
        role: "meter",
        "aria-label": label,
        "aria-valuemin": 0,
        "aria-valuemax": 100,
        "aria-valuenow": percent,
        "aria-valuetext": text,
      },
      h("span", { class: "bar", style: { width: `${percent}%` } }),
    ),
    h("span", { class: "num" }, text),
  );
}

/** A card with a heading. */
export function card(title, ...children) {
  const id = uid("card");
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

/** Show a dialog. `make(form)` fills it and returns the submit handler; resolves to its result, or undefined if closed. */
export function ask(title, action, make, kind = "primary") {
  return new Promise((resolve) => {
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const id = uid("dialog");
    const content = h("div", {});
    const submit = h("button", { type: "submit", class: kind }, action);
    const form = h(
      "form",
      {
        async onsubmit(event) {
          event.preventDefault();
          submit.disabled = true;
          try {
            result = await done();
            dialog.close();
          } catch (error) {
            problem.textContent = error.message;
            problem.hidden = false;
          }
          submit.disabled = false;
        },
      },
      h("h2", { id }, title),
      content,
      problem,
      h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), submit),
    );
    let result;
    const before = document.activeElement;
    const done = make(content) ?? (() => true);
    const dialog = h("dialog", { "aria-labelledby": id }, form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      // the element that opened the dialog may have been replaced
      (before?.isConnected ? before : document.querySelector(`[data-key="${CSS.escape(before?.dataset.key ?? "")}"]`))?.focus();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Show a message for a short time; screen readers read it, too. */
export function toast(text, kind = "") {
  const region = document.getElementById("toasts");
  const note = h("div", { class: `toast ${kind}` }, text);
  region?.append(note);
  setTimeout(() => note.remove(), kind === "bad" ? 12000 : 5000);
}
