// ThreadView: messages of the open conversation. A long conversation is rendered from its end, the rest in pieces.

import { MessageView } from "./message_view.js";

const AT_ONCE = 12; // number of messages that are rendered at a time
const PIECE_MS = 12;
const NEAR_END = 80; // maximum distance from the end, in pixels, that counts as the end

export class ThreadView {
  /** @param {HTMLElement} scroller @param {HTMLElement} list inside `scroller` @param {HTMLElement} toEnd button */
  constructor(scroller, list, toEnd, actions) {
    Object.assign(this, { _scroller: scroller, _list: list, _toEnd: toEnd, _actions: actions });
    this._views = new Map();
    this._pending = []; // the first messages, which are not rendered yet
    this._follows = true;
    this._top = 0; // last scroll position
    scroller.addEventListener("scroll", () => {
      const up = scroller.scrollTop < this._top; // the user scrolled up, or the content became shorter
      this._top = scroller.scrollTop;
      this._follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < (up ? 1 : NEAR_END);
      toEnd.hidden = this._follows;
    }, { passive: true });
    toEnd.onclick = () => {
      this.toEnd();
      scroller.focus(); // the button is hidden while it has the focus
    };
    const resized = new ResizeObserver(() => this._follow()); // the window, or a formula that is rendered later, changes its size
    resized.observe(scroller);
    resized.observe(list);
  }

  /** Show a conversation, scrolled to its end. */
  open(conversation, words) {
    this._words = words;
    this._conversation = conversation;
    this._edits = this._actions.edits(conversation);
    this._views.clear();
    this._list.replaceChildren();
    const path = conversation.path;
    this._pending = path.slice(0, -AT_ONCE);
    for (const message of path.slice(-AT_ONCE)) this._list.append(this._make(message).element);
    this.toEnd();
    this._goOn();
  }

  /**
   * Update to a changed conversation: remove messages that are no longer on its path, and add new ones.
   * Other views stay, with open editors and selections.
   */
  sync(conversation = this._conversation) {
    this._fill(Infinity);
    this._conversation = conversation;
    const path = conversation.path;
    const stays = new Set(path.filter((one) => this.view(one)?.shows(one, conversation.siblings(one))).map((one) => one.id));
    for (const [id, view] of this._views) {
      if (stays.has(id)) continue;
      view.element.remove();
      this._views.delete(id);
    }
    let last = null;
    for (const message of path) {
      const place = this.view(message)?.element ?? this._make(message).element;
      if (!place.isConnected && last) last.after(place);
      else if (!place.isConnected) this._list.prepend(place);
      last = place;
    }
  }

  /** The message that is being edited; undefined if there is none. */
  get edited() {
    return [...this._views.values()].find((view) => view.isEdited)?.message;
  }

  /** View of a message; undefined if the message is not rendered. */
  view(message) {
    return this._views.get(message.id);
  }

  /** Run `change`, which changes the content. If the end is in view, it stays in view. */
  update(change) {
    change();
    this._follow();
  }

  toEnd() {
    this._follows = true;
    this._follow();
  }

  _follow() {
    if (this._follows) this._scrollTo(this._scroller.scrollHeight);
  }

  /** Scroll to `top`, and store the new position before its scroll event arrives. */
  _scrollTo(top) {
    this._scroller.scrollTop = top;
    this._top = this._scroller.scrollTop;
  }

  _make(message) {
    const view = new MessageView(message, this._conversation.siblings(message), this._words, this._actions);
    this._views.set(message.id, view);
    const { [message.id]: edit, ...others } = this._edits;
    if (edit !== undefined) view.edit(edit);
    this._edits = others;
    return view;
  }

  _goOn() {
    if (!this._pending.length) return;
    const conversation = this._conversation;
    requestAnimationFrame(() => {
      if (conversation !== this._conversation) return;
      this._fill(PIECE_MS);
      this._goOn();
    });
  }

  _fill(milliseconds) {
    const begin = performance.now();
    const fromEnd = this._scroller.scrollHeight - this._scroller.scrollTop;
    const elements = [];
    while (this._pending.length && performance.now() - begin < milliseconds) {
      elements.unshift(this._make(this._pending.pop()).element);
    }
    if (!elements.length) return;
    this._list.prepend(...elements);
    this._scrollTo(this._scroller.scrollHeight - fromEnd);
  }
}
