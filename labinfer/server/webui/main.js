// Entry point of the chat page.

import { Api } from "./api.js";
import { showBanner } from "./banner.js";
import { Chat } from "./chat.js";
import { takeDroppedFiles } from "./dropped_files.js";
import { byId } from "./element.js";
import { MemoryStore } from "./memory_store.js";
import { openPreferences } from "./preferences_dialog.js";
import { Preferences } from "./preferences.js";
import { ServerState } from "./server_state.js";
import { connectShortcuts, openShortcuts } from "./shortcuts.js";
import { showIcons, showPreferences } from "./skeleton.js";
import { Store } from "./store.js";

const preferences = new Preferences();
const api = new Api(() => preferences.key);
const serverState = new ServerState(api);

showIcons();
showPreferences(preferences);
const store = await Store.open().catch(() => null);
byId("not-kept").hidden = Boolean(store);
const chat = new Chat(api, serverState, store ?? new MemoryStore(), preferences);
await chat.start();

const askPreferences = (forKey) => openPreferences(preferences, () => serverState.check(true), forKey);
const renderBanner = () => showBanner(serverState, preferences, () => askPreferences(true), () => serverState.check(true));

preferences.addEventListener("change", () => {
  showPreferences(preferences);
  chat.preferencesChanged();
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
byId("shortcuts").onclick = () => openShortcuts(preferences);
connectShortcuts(chat, preferences);
takeDroppedFiles(document.body, (files) => chat.composer.attach(files));
await serverState.check();
