// Dialog of a conversation's settings: system prompt and sampling parameters. Empty fields use the server's defaults.

import { choice, field, openDialog } from "./dialog.js";
import { make } from "./element.js";
import { presetRow } from "./preset_row.js";

const FIELDS = {
  temperature: [0, 100, 0.05], top_p: [0, 1, 0.05], top_k: [-1, 2 ** 31 - 1, 1], min_p: [0, 1, 0.01], max_tokens: [1, 2 ** 31 - 1, 1],
  repetition_penalty: [0.01, 100, 0.05], presence_penalty: [-2, 2, 0.1], frequency_penalty: [-2, 2, 0.1], seed: [0, 2 ** 53 - 1, 1],
}; // [minimum, maximum, step]; bounds as in sampling_params.py
const ABOVE_LEAST = ["top_p"]; // fields whose minimum is not an allowed value
const WHOLE = ["top_k", "max_tokens", "seed"];
const TOP_LOGPROBS = [0, 1, 3, 5];

/**
 * @param {object} record the conversation's record
 * @param {object} defaults the server's default of each field
 * @param {import("./presets.js").Presets} presets
 * @param {(chosen: {system: string, settings: object}) => void} onsave
 */
export function openSettings(record, defaults, presets, words, onsave) {
  const system = make("textarea", { rows: 3 });
  const numbers = Object.entries(FIELDS).map(([name, [min, max, step]]) => {
    const shown = name === "seed" ? words.random : defaults[name] !== undefined ? words.defaultIs(defaults[name]) : words.serverDecides;
    const input = make("input", { type: "number", min, max, step, placeholder: shown, name });
    input.inputMode = min < 0 ? "text" : "decimal"; // numeric keyboards of phones lack a minus sign
    input.oninput = () => refused?.control === input && tell(null);
    return [name, input];
  });
  const stop = make("textarea", { rows: 2 });
  const logprobs = choice([["", words.logprobsOff], ...TOP_LOGPROBS.map((n) => [String(n), words.logprobsTop(n)])], "");
  const drafted = make("input", { type: "checkbox" });
  const extra = make("textarea", { rows: 2, spellcheck: false, className: "mono" });
  const forNew = make("input", { type: "checkbox" });
  const wrong = make("p", { className: "failure", role: "alert", id: "settings-wrong" });
  let refused = null;

  function show({ system: told = "", settings = {} }) {
    tell(null);
    system.value = told;
    for (const [name, input] of numbers) input.value = settings[name] ?? "";
    stop.value = (settings.stop ?? []).join("\n");
    logprobs.value = String(settings.logprobs ?? "");
    drafted.checked = Boolean(settings.return_drafted);
    extra.value = settings.extra ? JSON.stringify(settings.extra) : "";
  }

  /** The entered settings; null if invalid, after showing the error. */
  function read() {
    const chosen = {};
    for (const [name, input] of numbers) {
      const why = wrongNumber(name, input, words);
      if (why) return tell({ control: input, why: `${words.fields[name]}${words.colon}${why}` });
      if (input.value !== "") chosen[name] = Number(input.value);
    }
    const strings = stop.value.split("\n").filter(Boolean);
    if (strings.length) chosen.stop = strings;
    if (logprobs.value) chosen.logprobs = Number(logprobs.value);
    if (drafted.checked) chosen.return_drafted = true;
    if (extra.value.trim()) {
      try { chosen.extra = JSON.parse(extra.value); } catch { /* invalid JSON is reported below */ }
      if (chosen.extra?.constructor !== Object) return tell({ control: extra, why: words.extraWrong });
    }
    tell(null);
    return { system: system.value.trim(), settings: chosen };
  }

  /** Show an error at the control with the invalid value; null clears it. */
  function tell(now) {
    refused?.control.removeAttribute("aria-invalid");
    refused = now;
    wrong.textContent = now?.why ?? "";
    now?.control.setAttribute("aria-invalid", "true");
    now?.control.focus();
    return null;
  }

  function save() {
    const chosen = read();
    if (!chosen) return false;
    if (forNew.checked) presets.forNew = chosen;
    onsave(chosen);
    return true;
  }

  show(record);
  openDialog(words.settings, [
    presetRow(presets, words, show, read),
    field(words.systemPrompt, system, words.systemHint),
    make("div", { className: "grid two" }, ...numbers.map(([name, input]) => field(words.fields[name], input, words.fieldHints[name]))),
    make("div", { className: "grid two" }, field(words.stopStrings, stop), field(words.logprobs, logprobs)),
    make("label", { className: "check" }, drafted, words.showDrafted),
    field(words.extra, extra),
    make("label", { className: "check" }, forNew, words.forNewChats), wrong,
  ], [{ label: words.cancel, run() {} }, { label: words.save, primary: true, run: save }], words.close);
}

/** Error text of a number that the server rejects; "" if valid. */
function wrongNumber(name, input, words) {
  const [least, most] = FIELDS[name], value = Number(input.value);
  if (input.validity.badInput) return words.numberWrong;
  if (input.value === "") return "";
  if (WHOLE.includes(name) && !Number.isInteger(value)) return words.numberNotWhole;
  if (ABOVE_LEAST.includes(name) && value === least) return words.numberNotAbove(least, most);
  return value < least || value > most ? words.numberOutside(least, most) : "";
}
