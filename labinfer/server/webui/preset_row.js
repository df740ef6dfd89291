// Row of the settings dialog to choose, save and delete presets.

import { choice, field } from "./dialog.js";
import { make } from "./element.js";
import { composes } from "./enter_key.js";

/**
 * @param {import("./presets.js").Presets} presets
 * @param {(preset: object) => void} onchoose
 * @param {() => object|null} read returns the entered settings; null if invalid
 */
export function presetRow(presets, words, onchoose, read) {
  const place = make("div", { className: "presets" });

  function render(chosen = "") {
    const select = choice([["", words.noPreset], ...presets.names.map((name) => [name, name])], chosen);
    const keep = make("button", { type: "button", onclick: askName }, words.savePreset);
    const remove = make("button", { type: "button", hidden: !chosen, onclick: () => {
      presets.remove(select.value);
      render();
      place.querySelector("select").focus();
    } }, words.removePreset);
    select.onchange = () => {
      remove.hidden = !select.value;
      if (select.value) onchoose(presets.get(select.value));
    };
    place.replaceChildren(field(words.preset, select), keep, remove);
  }

  function askName() {
    const entered = read();
    if (!entered) return;
    const name = make("input", { maxLength: 60, value: place.querySelector("select").value });
    const end = (keeps) => {
      const given = name.value.trim();
      if (keeps && !given) return name.focus();
      if (keeps) presets.keep(given, entered);
      render(keeps ? given : "");
      place.querySelector("select").focus();
    };
    name.onkeydown = (event) => {
      if (event.key !== "Enter" || composes(event)) return;
      event.preventDefault();
      event.stopPropagation(); // by default Enter also presses the dialog's button
      end(true);
    };
    place.replaceChildren(field(words.presetName, name), make("button", { type: "button", className: "primary", onclick: () => end(true) }, words.createPreset),
      make("button", { type: "button", onclick: () => end(false) }, words.cancel));
    name.focus();
  }

  render();
  return place;
}
