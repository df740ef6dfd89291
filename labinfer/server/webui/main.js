// The chat page begins here.

import { Api } from "./api.js";
import { showBanner } from "./banner.js";
import { Chat } from "./chat.js";
import { byId } from "./element.js";
import { icon } from "./icon.js";
import { MemoryStore } from "./memory_store.js";
import { openPreferences } from "./preferences_dialog.js";
import { Preferences } from "./preferences.js";
import { ServerState } from "./server_state.js";
import { Store } from "./store.js";

const preferences = new Preferences();
const api = new Api(() => preferences.key);
const serverState = new ServerState(api);

for (const place of document.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
showPreferences();
const store = await Store.open().catch(() => null);
byId("not-kept").hidden = Boolean(store);
const chat = new Chat(api, serverState, store ?? new MemoryStore(), preferences);
await chat.start();

const askPreferences = (forKey) => openPreferences(preferences, () => serverState.check(true), forKey);
const renderBanner = () => showBanner(serverState.trouble, preferences, () => askPreferences(true), () => serverState.check(true));

preferences.addEventListener("change", () => {
  showPreferences();
  chat.render();
  renderBanner();
});
serverState.addEventListener("change", () => {
  chat.serverChanged();
  renderBanner();
});
byId("preferences").onclick = () => askPreferences(false);
byId("export-all").onclick = () => chat.exportAll();
byId("import").onclick = () => byId("import-file").click();
byId("import-file").onchange = async ({ target }) => {
  if (target.files.length) await chat.importFile(target.files[0]);
  target.value = "";
};
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) chat.stop();
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    chat.focusSearch();
  }
});
await serverState.check();

/** The words of the page's skeleton, and its colours. */
function showPreferences() {
  const { words, shownTheme } = preferences;
  document.documentElement.lang = words.language;
  document.documentElement.dataset.theme = shownTheme;
  for (const place of document.querySelectorAll("[data-word]")) {
    const text = place.querySelector(":scope > .text") ?? place.appendChild(Object.assign(document.createElement("span"), { className: "text" }));
    text.textContent = words[place.dataset.word];
  }
  for (const place of document.querySelectorAll("[data-label]")) {
    place.setAttribute("aria-label", words[place.dataset.label]);
    if (place.tagName === "BUTTON") place.title = words[place.dataset.label];
  }
  for (const place of document.querySelectorAll("[data-placeholder]")) place.placeholder = words[place.dataset.placeholder];
}
