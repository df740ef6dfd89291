// Keyboard shortcuts of the chat page.

import { openDialog } from "./dialog.js";
import { make } from "./element.js";
import { composes } from "./enter_key.js";

const LIST = [
  ["Enter", "send"], ["Shift+Enter", "newLine"], ["Esc", "stop"], ["Ctrl+K", "search"], ["Ctrl+Shift+O", "newChat"],
  ["Ctrl+Shift+S", "sidebar"], ["Ctrl+/", "shortcuts"],
]; // on a Mac, Ctrl stands for Command

/** Handle the shortcuts. @param {import("./chat.js").Chat} chat */
export function connectShortcuts(chat, preferences) {
  addEventListener("keydown", (event) => {
    const isOpen = Boolean(document.querySelector("dialog[open]"));
    if (event.key === "Escape" && !composes(event) && !isOpen) chat.stop();
    const run = event.ctrlKey || event.metaKey ? actionOf(event, chat, preferences) : null;
    if (!run || (isOpen && event.key !== "k")) return;
    event.preventDefault();
    run();
  });
}

/** Show the list of shortcuts. */
export function openShortcuts({ words }) {
  const rows = LIST.flatMap(([keys, name]) => [make("dt", {}, ...keysOf(keys)), make("dd", {}, words.shortcutsDo[name])]);
  openDialog(words.shortcuts, [make("dl", { className: "shortcuts" }, ...rows)], [{ label: words.close, primary: true, run() {} }], words.close);
}

function actionOf({ key, shiftKey }, chat, preferences) {
  const name = key.toLowerCase();
  if (name === "k" && !shiftKey) return () => chat.sidebar.focusSearch();
  if (name === "o" && shiftKey) return () => { chat.openNew(); };
  if (name === "s" && shiftKey) return () => chat.sidebar.toggle();
  return name === "/" ? () => openShortcuts(preferences) : null;
}

function keysOf(text) {
  const isMac = /Mac|iPhone|iPad/.test(navigator.userAgent);
  const keys = text.split("+").map((key) => (key === "Ctrl" && isMac ? "⌘" : key));
  return keys.flatMap((key, index) => [...(index ? ["+"] : []), make("kbd", {}, key)]);
}
