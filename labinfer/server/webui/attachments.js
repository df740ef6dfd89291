// Attachments: text files that go with a message.

import { iconButton, make } from "./element.js";

const MOST_BYTES = 1 << 20;
const MOST_FILES = 10;
const UTF_16 = { "255,254": "utf-16le", "254,255": "utf-16be" }; // by byte order mark

export class Attachments {
  /** @param {HTMLElement} place where they are listed @param {HTMLElement} trouble where it is said why a file is not taken */
  constructor(place, trouble, preferences, store, onchange) {
    Object.assign(this, { _place: place, _trouble: trouble, _preferences: preferences, _store: store, _onchange: onchange });
    /** @type {{name: string, text: string}[]} */
    this.files = [];
    this._opened = new Map(); // likewise, by conversation
    this._restoring = new Map(); // promises, by conversation: that those of last time are among them
  }

  /** Show those of this conversation. */
  open(id) {
    this._conversation = id;
    this.files = this._opened.get(id) ?? this._restored(id);
    this._trouble.textContent = "";
    this._render();
  }

  /** Take in those files that are text. @param {Iterable<File>} files */
  async add(files) {
    const troubles = [], taken = this.files, conversation = this._conversation; // another one may be open when they are read
    for (const file of [...files]) { // what was dropped is gone after the event
      try {
        if (taken.length >= MOST_FILES) throw new Error(this._preferences.words.tooManyFiles(MOST_FILES));
        taken.push({ name: file.name, text: await readText(file, this._preferences.words) });
      } catch (error) {
        troubles.push(error.message);
      }
    }
    this._trouble.textContent = troubles.join(" ");
    await this._restoring.get(conversation); // else those of last time would be written over
    this._keep(conversation, taken);
    this._render();
  }

  /** Those that are there, which go with a message now. */
  take() {
    this._trouble.textContent = "";
    const taken = this.files.splice(0);
    this._keep(this._conversation, this.files);
    this._render();
    return taken;
  }

  /** Files that were there when the page was last open come when they are read. */
  _restored(id) {
    const files = [];
    this._opened.set(id, files);
    this._restoring.set(id, this._store.attachments(id).then((kept) => {
      files.unshift(...kept);
      if (files === this.files) this._render();
    }, () => {})); // where the browser keeps nothing, the page has said so
    return files;
  }

  _keep(id, files) {
    this._store.keepAttachments(id, files).catch(() => {}); // they are there until the page is closed
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

/** The files of a message, each unfolded by a click. @param {{name: string, text: string}[]} files */
export function attachmentViews(files, words) {
  return files.map(({ name, text }) => make("details", { className: "attachment" },
    make("summary", {}, name, make("span", { className: "hint" }, ` ${words.characters(text.length)}`)),
    make("pre", { tabIndex: 0 }, text)));
}

/** @param {File} file @throws {Error} in words: it is too large, a folder, or no text */
async function readText(file, words) {
  if (file.size > MOST_BYTES) throw new Error(words.fileTooLarge(file.name));
  const buffer = await file.arrayBuffer().catch(() => null); // of a folder, or of a file that is gone
  if (!buffer) throw new Error(words.fileUnreadable(file.name));
  const bytes = new Uint8Array(buffer);
  const mark = UTF_16[bytes.slice(0, 2)];
  if (String.fromCharCode(...bytes.slice(0, 5)) === "%PDF-") throw new Error(words.fileIsPdf(file.name));
  if (!mark && bytes.includes(0)) throw new Error(words.fileIsNoText(file.name));
  for (const encoding of mark ? [mark] : ["utf-8", words.oldEncoding]) {
    try { return new TextDecoder(encoding, { fatal: true }).decode(bytes); } catch { /* it has another encoding */ }
  }
  throw new Error(words.fileIsNoText(file.name));
}
