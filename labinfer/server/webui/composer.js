// Composer: input of the next message. Drafts survive a reload.

import { Attachments } from "./attachments.js";
import { byId } from "./element.js";
import { sends } from "./enter_key.js";

export class Composer {
  /** @param {(text: string, files: {name: string, text: string}[]) => void} onsend @param {() => void} onstop */
  constructor(preferences, store, onsend, onstop) {
    Object.assign(this, { _preferences: preferences, _onsend: onsend });
    this._input = byId("input");
    this._attachments = new Attachments(byId("attached"), byId("not-attached"), preferences, store, () => this._fit());
    this._conversation = null;
    this._answering = false;
    this._input.oninput = () => {
      preferences.keepDraft(this._conversation, this._input.value);
      this._fit();
    };
    this._input.onkeydown = (event) => {
      if (!sends(event)) return;
      event.preventDefault();
      this._send();
    };
    byId("send").onclick = () => this._send();
    byId("stop").onclick = onstop;
    byId("attach").onclick = () => byId("attach-files").click();
    byId("attach-files").onchange = async ({ target }) => {
      await this.attach(target.files);
      target.value = "";
    };
    this._input.onpaste = (event) => {
      if (!event.clipboardData.files.length || event.clipboardData.getData("text")) return;
      event.preventDefault();
      this.attach(event.clipboardData.files);
    };
    addEventListener("resize", () => this._fit());
  }

  /** @param {string} id conversation id, or "new" */
  open(id) {
    if (id === this._conversation) return;
    this._conversation = id;
    this._attachments.open(id);
    this._input.value = this._preferences.draft(id);
    this._fit();
  }

  /** Attach files to the next message. */
  async attach(files) {
    await this._attachments.add(files);
    this.focus();
  }

  /** Show the stop button in place of the send button while an answer is generated. */
  set answering(value) {
    const focused = [byId("send"), byId("stop")].includes(document.activeElement);
    this._answering = value;
    byId("send").hidden = value;
    byId("stop").hidden = !value;
    if (focused) this.focus();
    this._fit();
  }

  focus() {
    if (matchMedia("(pointer: fine)").matches) this._input.focus(); // not on touch screens, where the keyboard would open
  }

  _send() {
    const text = this._input.value.trim();
    if (!(text || this._attachments.files.length) || this._answering) return;
    const files = this._attachments.take();
    this._input.value = "";
    this._preferences.keepDraft(this._conversation, "");
    this._fit();
    this._onsend(text, files);
  }

  _fit() {
    byId("send").disabled = !(this._input.value.trim() || this._attachments.files.length);
    this._input.style.height = "auto";
    this._input.style.height = `${Math.min(this._input.scrollHeight, innerHeight * 0.4)}px`;
  }
}
