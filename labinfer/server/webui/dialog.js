// Dialogs: the native <dialog>, which traps the focus, closes on Esc and restores the focus.

import { iconButton, make } from "./element.js";
import { composes } from "./enter_key.js";

let count = 0; // number of the next id, for unique ids

/**
 * Show a dialog. Enter in a text field presses the primary button.
 * @param {string} title
 * @param {(Node|string)[]} content
 * @param {{label: string, primary?: boolean, danger?: boolean, run: () => (boolean|void)}[]} buttons the dialog stays
 *   open if `run` returns false
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
    if (event.key === "Escape") event.stopPropagation(); // Escape must close the dialog and not stop an answer
    if (event.key === "Enter" && event.target.tagName === "INPUT" && !composes(event)) {
      event.preventDefault(); // else Enter also presses the button that regains the focus
      row.find((one) => one.classList.contains("primary"))?.click();
    }
  });
  dialog.onclose = () => dialog.remove();
  document.body.append(dialog);
  dialog.showModal();
  if (matchMedia("(pointer: fine)").matches) dialog.querySelector(".dialog-body :is(input, select, textarea), .dialog-body ~ .row button").focus();
  return dialog;
}

/** A form control with a label and an optional hint. */
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

/** A select element. @param {[string, string][]} options (value, label) pairs */
export function choice(options, value) {
  const select = make("select", {}, ...options.map(([one, label]) => make("option", { value: one }, label)));
  select.value = value;
  return select;
}
