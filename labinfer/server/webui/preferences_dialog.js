// Dialog for language, theme and API key.

import { choice, field, openDialog } from "./dialog.js";
import { make } from "./element.js";

/** @param {import("./preferences.js").Preferences} preferences @param {boolean} forKey whether to focus the API key */
export function openPreferences(preferences, onclosed, forKey = false) {
  const { words } = preferences;
  const language = choice([["", words.browserDefault], ["en", "English"], ["zh", "中文"]], preferences.language);
  const theme = choice([["", words.themes.system], ["light", words.themes.light], ["dark", words.themes.dark]], preferences.theme);
  const key = make("input", { type: "password", value: preferences.key, autocomplete: "off", spellcheck: false });
  const save = () => {
    if (preferences.key !== key.value.trim()) preferences.key = key.value;
    if (preferences.theme !== theme.value) preferences.theme = theme.value;
    if (preferences.language !== language.value) preferences.language = language.value;
    onclosed();
  };
  openDialog(words.preferences, [
    field(words.interfaceLanguage, language), field(words.theme, theme), field(words.key, key, words.keyHint),
  ], [{ label: words.cancel, run() {} }, { label: words.save, primary: true, run: save }], words.close);
  if (forKey) key.focus();
}
