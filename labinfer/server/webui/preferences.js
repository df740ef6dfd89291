// Preferences: language, theme and API key, stored in localStorage.

import { chinese } from "./words_zh.js";
import { english } from "./words_en.js";

const LANGUAGES = { en: english, zh: chinese };
const dark = matchMedia("(prefers-color-scheme: dark)");

export class Preferences extends EventTarget {
  constructor(storage = localStorage) {
    super();
    this._storage = storage;
    dark.addEventListener("change", () => this._changed());
  }

  /** "en", "zh", or "" for the browser's language. */
  get language() { return this._get("language"); }
  set language(value) { this._set("language", value); }

  /** "light", "dark", or "" for the system's theme. */
  get theme() { return this._get("theme"); }
  set theme(value) { this._set("theme", value); }

  get key() { return this._get("key"); }
  set key(value) { this._set("key", value.trim()); }

  /** Texts of the page in the chosen language; see words_en.js. */
  get words() {
    const wanted = this.language || (navigator.languages ?? [navigator.language]).map((tag) => tag.slice(0, 2))
      .find((tag) => tag in LANGUAGES);
    return LANGUAGES[wanted] ?? english;
  }

  get shownTheme() {
    return this.theme || (dark.matches ? "dark" : "light");
  }

  /** Draft message of a conversation. */
  draft(id) { return this._get(`draft.${id}`); }
  keepDraft(id, text) { this._write(`draft.${id}`, text); }

  /** Open edits of a conversation: message id to the edited text. @param {string} conversation id */
  edits(conversation) { return JSON.parse(this.draft(`${conversation}.edits`) || "{}"); }

  /** @param {string} [text] edited text; undefined ends the edit */
  keepEdit({ id, conversation }, text) {
    const edits = JSON.stringify({ ...this.edits(conversation), [id]: text });
    this.keepDraft(`${conversation}.edits`, edits === "{}" ? "" : edits);
  }

  forgetDrafts(conversation) {
    this.keepDraft(conversation, "");
    this.keepDraft(`${conversation}.edits`, "");
  }

  /** Store a text under a name, without a change event. */
  kept(name) { return this._get(name); }
  keep(name, text) { this._write(name, text); }

  _get(name) {
    try { return this._storage.getItem(`labinfer.${name}`) ?? ""; } catch { return ""; }
  }

  _set(name, value) {
    this._write(name, value);
    this._changed();
  }

  _write(name, value) {
    try {
      if (value) this._storage.setItem(`labinfer.${name}`, value);
      else this._storage.removeItem(`labinfer.${name}`);
    } catch { /* if the browser stores nothing, the text is lost when the page closes */ }
  }

  _changed() { this.dispatchEvent(new Event("change")); }
}
