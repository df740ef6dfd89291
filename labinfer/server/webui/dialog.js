// Dialogs: the browser's own <dialog>, which keeps the focus, closes by Esc, and gives the focus back.

import { iconButton, make } from "./element.js";
import { composes } from "./enter_key.js";

let count = 0; // for ids

/**
 * Show a dialog until it is closed. Enter in a line of text is its primary button.
 * @param {string} title
 * @param {(Node|string)[]} content
 * @param {{label: string, primary?: boolean, danger?: boolean, run: () => (boolean|void)}[]} buttons false from `run` keeps it open
 */
export function openDialog(title, content, buttons, closeLabel) {
  const id = `dialog-${++count}`;
  const dialog = make("dialog", { "aria-labelledby": id });
  const row = buttons.map(({ label, primary, danger, run }) => make("button", {
    type: "button", className: danger ? "danger" : primary ? "primary" : "",
    onclick: () => { if (run() !== false) dialog.close(); },
  }, label));
  dialog.append(
    make("div", { className: "dialog-head" }, make("h2", { id }, title), iconButton("close", closeLabel, () => dialog.close())),
    make("div", { className: "dialog-body" }, ...content),
    make("div", { className: "row" }, ...row),
  );
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.stopPropagation(); // it closes the dialog and stops no answer
    if (event.key === "Enter" && event.target.tagName === "INPUT" && !composes(event)) {
      event.preventDefault(); // it would press the button that the focus goes back to
      row.find((one) => one.classList.contains("primary"))?.click();
    }
  });
  dialog.onclose = () => dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
  if (matchMedia("(pointer: fine)").matches) dialog.querySelector(".dialog-body :is(input, select, textarea), .dialog-body ~ .row button").focus();
  return dialog;
}

/** A control with its label above and perhaps a hint below. */
export function field(label, control, hint = "") {
  const parts = [make("span", { className: "label" }, label), control];
  if (hint) {
    control.id ||= `field-${++count}`;
    const text = make("span", { className: "hint", id: `${control.id}-hint` }, hint);
    control.setAttribute("aria-describedby", text.id);
    parts.push(text);
  }
  return make("label", { className: "field" }, ...parts);
}

/** A choice. @param {[string, string][]} options value and label */
export function choice(options, value) {
  const select = make("select", {}, ...options.map(([one, label]) => make("option", { value: one }, label)));
  select.value = value;
  return select;
}
