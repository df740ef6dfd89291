// Attachments: text files attached to the next message.

import { iconButton, make } from "./element.js";

const MOST_BYTES = 1 << 20;
const MOST_FILES = 10;
const UTF_16 = { "255,254": "utf-16le", "254,255": "utf-16be" }; // byte order mark → encoding

export class Attachments {
  /** @param {HTMLElement} place list of the files @param {HTMLElement} trouble shows why a file was rejected */
  constructor(place, trouble, preferences, store, onchange) {
    Object.assign(this, { _place: place, _trouble: trouble, _preferences: preferences, _store: store, _onchange: onchange });
    /** @type {{name: string, text: string}[]} */
    this.files = [];
    this._opened = new Map(); // conversation id → attached files
    this._restoring = new Map(); // conversation id → promise of the stored files
  }

  /** Show the files of a conversation. */
  open(id) {
    this._conversation = id;
    this.files = this._opened.get(id) ?? this._restored(id);
    this._trouble.textContent = "";
    this._render();
  }

  /** Attach the files that are text. @param {Iterable<File>} files */
  async add(files) {
    const troubles = [], taken = this.files, conversation = this._conversation; // the user may open another conversation meanwhile
    for (const file of [...files]) { // a copy, as the browser empties a dropped list after the event
      try {
        if (taken.length >= MOST_FILES) throw new Error(this._preferences.words.tooManyFiles(MOST_FILES));
        taken.push({ name: file.name, text: await readText(file, this._preferences.words) });
      } catch (error) {
        troubles.push(error.message);
      }
    }
    this._trouble.textContent = troubles.join(" ");
    await this._restoring.get(conversation); // saving before stored files are loaded would overwrite them
    this._keep(conversation, taken);
    this._render();
  }

  /** Return all files, for the message that is sent, and detach them. */
  take() {
    this._trouble.textContent = "";
    const taken = this.files.splice(0);
    this._keep(this._conversation, this.files);
    this._render();
    return taken;
  }

  /** Load the files that were attached when the page was last open. */
  _restored(id) {
    const files = [];
    this._opened.set(id, files);
    this._restoring.set(id, this._store.attachments(id).then((kept) => {
      files.unshift(...kept);
      if (files === this.files) this._render();
    }, () => {})); // continue without files; a notice says that storing fails
    return files;
  }

  _keep(id, files) {
    this._store.keepAttachments(id, files).catch(() => {}); // a failure is ignored: the files stay in memory
  }

  _render() {
    const { words } = this._preferences;
    this._place.replaceChildren(...this.files.map((file) => make("li", {}, make("span", { className: "name" }, file.name),
      iconButton("close", words.removeFile(file.name), () => {
        this.files.splice(this.files.indexOf(file), 1);
        this._keep(this._conversation, this.files);
        this._render();
      }))));
    this._trouble.hidden = !this._trouble.textContent;
    this._onchange();
  }
}

/** Files of a message, as expandable blocks. @param {{name: string, text: string}[]} files */
export function attachmentViews(files, words) {
  return files.map(({ name, text }) => make("details", { className: "attachment" },
    make("summary", {}, name, make("span", { className: "hint" }, ` ${words.characters(text.length)}`)),
    make("pre", { tabIndex: 0 }, text)));
}

/** @param {File} file @throws {Error} with a message for the user: too large, a folder, or not text */
async function readText(file, words) {
  if (file.size > MOST_BYTES) throw new Error(words.fileTooLarge(file.name));
  const buffer = await file.arrayBuffer().catch(() => null); // fails for a folder or a deleted file
  if (!buffer) throw new Error(words.fileUnreadable(file.name));
  const bytes = new Uint8Array(buffer);
  const mark = UTF_16[bytes.slice(0, 2)];
  if (String.fromCharCode(...bytes.slice(0, 5)) === "%PDF-") throw new Error(words.fileIsPdf(file.name));
  if (!mark && bytes.includes(0)) throw new Error(words.fileIsNoText(file.name));
  for (const encoding of mark ? [mark] : ["utf-8", words.oldEncoding]) {
    try { return new TextDecoder(encoding, { fatal: true }).decode(bytes); } catch { /* the text has another encoding */ }
  }
  throw new Error(words.fileIsNoText(file.name));
}
