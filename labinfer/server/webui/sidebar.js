// Sidebar: list of conversations, with search, rename, export and delete.

import { openDialog } from "./dialog.js";
import { dayGroup } from "./day_group.js";
import { byId, iconButton, make } from "./element.js";
import { composes } from "./enter_key.js";
import { search } from "./search.js";

const SEARCH_MS = 150; // delay of a search after the last key press
const TRASH = 3; // index of the delete button among the buttons of a conversation

export class Sidebar {
  /** @param {object} actions open(id), rename(id, title), remove(id), export(id) */
  constructor(store, preferences, actions) {
    Object.assign(this, { _store: store, _preferences: preferences, _actions: actions, _list: byId("conversations"), _search: byId("search") });
    this._records = [];
    this._busy = new Set();
    this._renaming = false;
    this._matches = null; // conversation ids found by the search; null without a search
    this._search.oninput = () => {
      clearTimeout(this._timer);
      this._timer = setTimeout(() => this._seek(), SEARCH_MS);
    };
    this._search.onkeydown = (event) => {
      if (event.key !== "Escape" || !this._search.value) return;
      event.stopPropagation(); // Escape must clear the search and do nothing else
      if (composes(event)) return;
      this.endSearch(); // not all browsers clear the field at Escape
      this.render(this._records, this._current, this._busy, this._words);
    };
    byId("open-sidebar").onclick = () => this.toggle();
    byId("close-sidebar").onclick = () => this.show(false, true);
    byId("collapse").onclick = () => this.toggle();
    byId("veil").onclick = () => this.show(false);
    this._narrow = matchMedia("(max-width: 760px)");
    this._narrow.onchange = () => this.show(false);
    byId("sidebar").onkeydown = (event) => {
      if (event.key === "Escape" && document.body.classList.contains("sidebar-open")) {
        event.stopPropagation();
        this.show(false, true);
      }
    };
    this.show(false);
  }

  /** Open or close the sidebar of a narrow screen; on a wide screen it is visible unless collapsed. */
  show(open, giveFocusBack = false) {
    const narrow = this._narrow.matches, folded = !narrow && Boolean(this._preferences.kept("folded"));
    document.body.classList.toggle("sidebar-open", narrow && open);
    document.body.classList.toggle("sidebar-folded", folded);
    byId("sidebar").inert = folded || (narrow && !open);
    document.querySelector("main").inert = narrow && open;
    byId("open-sidebar").setAttribute("aria-expanded", String(narrow ? open : !folded));
    if (narrow && open) byId("close-sidebar").focus();
    if (narrow && giveFocusBack) byId("open-sidebar").focus();
  }

  /** Collapse or expand the sidebar. */
  toggle() {
    const narrow = this._narrow.matches;
    if (!narrow) this._preferences.keep("folded", this._preferences.kept("folded") ? "" : "yes");
    this.show(!document.body.classList.contains("sidebar-open"), true);
    if (!narrow) byId(this._preferences.kept("folded") ? "open-sidebar" : "collapse").focus();
  }

  /** End the search. */
  endSearch() {
    this._search.value = "";
    this._matches = null;
  }

  focusSearch() {
    this._preferences.keep("folded", "");
    this.show(true);
    this._search.focus();
    this._search.select();
  }

  /** @param {object[]} records @param {string} current id of the open conversation @param {Set<string>} busy ids of conversations that are being answered */
  render(records, current, busy, words) {
    const opened = current !== this._current;
    Object.assign(this, { _records: records, _current: current, _busy: busy, _words: words });
    if (this._renaming) return; // the list is rendered when renaming ends
    const focused = document.activeElement.closest("#conversations li");
    const button = focused && [...focused.querySelectorAll("button")].indexOf(document.activeElement);
    const shown = records.filter(({ id }) => !this._matches || this._matches.has(id));
    this._list.replaceChildren(...this._items(shown));
    const none = byId("none-found");
    none.hidden = shown.length > 0;
    none.textContent = this._matches ? words.noneFound : words.noConversations;
    if (focused) this._giveFocusBack(focused.dataset.id, button);
    if (opened) this._place(current)?.scrollIntoView({ block: "nearest" });
  }

  /** List items, grouped by day or month. */
  _items(records) {
    const items = [];
    let group = "";
    for (const record of records) {
      const own = dayGroup(record.updated, this._words);
      if (own !== group) items.push(make("li", { className: "day" }, own));
      group = own;
      items.push(this._item(record));
    }
    return items;
  }

  async _seek() {
    const text = this._search.value.trim();
    const ids = text ? await search(this._store, text) : null;
    if (text !== this._search.value.trim()) return; // superseded by a later search
    this._matches = ids;
    this.render(this._records, this._current, this._busy, this._words);
  }

  _item(record) {
    const words = this._words, title = record.title || words.untitled;
    const open = make("button", { type: "button", className: "open", title, onclick: () => this._actions.open(record.id) },
      make("span", { className: "name" }, title));
    if (record.id === this._current) open.setAttribute("aria-current", "page");
    if (this._busy.has(record.id)) open.append(make("span", { className: "busy", role: "img", "aria-label": words.writing }));
    return make("li", { "data-id": record.id }, open, make("span", { className: "tools" },
      iconButton("edit", `${words.rename}: ${title}`, () => this._rename(record)),
      iconButton("download", `${words.exportOne}: ${title}`, () => this._actions.export(record.id)),
      iconButton("trash", `${words.remove}: ${title}`, () => this._remove(record, title)),
    ));
  }

  _rename(record) {
    const input = make("input", { value: record.title, "aria-label": this._words.rename, maxLength: 200 });
    const end = (keep, giveFocusBack) => {
      if (!this._renaming) return;
      this._renaming = false;
      const title = input.value.trim();
      if (keep && title && title !== record.title) this._actions.rename(record.id, title);
      this.render(this._records, this._current, this._busy, this._words);
      if (giveFocusBack) this._giveFocusBack(record.id, 0);
    };
    input.onkeydown = (event) => {
      event.stopPropagation();
      if (composes(event)) return;
      if (event.key === "Enter") end(true, true);
      if (event.key === "Escape") end(false, true);
    };
    input.onblur = () => end(true, false);
    this._renaming = true;
    this._place(record.id).replaceChildren(input);
    input.focus();
    input.select();
  }

  /** Focus a button of a conversation, or "New chat" if the conversation was deleted. */
  _giveFocusBack(id, button) {
    const buttons = this._place(id)?.querySelectorAll("button") ?? [byId("new")];
    buttons[0].focus(); // focused first, which makes the other buttons visible
    buttons[button]?.focus();
  }

  _place(id) {
    return this._list.querySelector(`[data-id="${id}"]`);
  }

  _remove(record, title) {
    const words = this._words;
    const dialog = openDialog(words.remove, [make("p", {}, words.removeAsk(title))], [
      { label: words.cancel, run() {} },
      { label: words.remove, danger: true, run: () => { this._actions.remove(record.id); } },
    ], words.close);
    dialog.addEventListener("close", () => this._giveFocusBack(record.id, TRASH)); // the button is hidden while the dialog is open
  }
}
