// Presets: named settings, and the initial settings of new conversations, stored in this browser.

export class Presets {
  /** @param {import("./preferences.js").Preferences} preferences */
  constructor(preferences) {
    this._preferences = preferences;
  }

  /** System prompt and settings with which new conversations start; may be empty. */
  get forNew() { return structuredClone(this._read().forNew ?? {}); }
  set forNew(chosen) { this._write({ forNew: chosen }); }

  /** Names of the presets, sorted. @returns {string[]} */
  get names() { return Object.keys(this._read().named ?? {}).sort((a, b) => a.localeCompare(b)); }

  /** @returns {{system: string, settings: object}|undefined} */
  get(name) { return this._read().named?.[name]; }

  keep(name, chosen) { this._write({ named: { ...this._read().named, [name]: chosen } }); }

  remove(name) {
    const { [name]: _, ...named } = this._read().named ?? {};
    this._write({ named });
  }

  _read() { return JSON.parse(this._preferences.kept("presets") || "{}"); }

  _write(fields) { this._preferences.keep("presets", JSON.stringify({ ...this._read(), ...fields })); }
}
