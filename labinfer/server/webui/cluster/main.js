// Entry point of the cluster page.

import { Api } from "../api.js";
import { showBanner } from "../banner.js";
import { byId } from "../element.js";
import { openPreferences } from "../preferences_dialog.js";
import { Preferences } from "../preferences.js";
import { ServerState } from "../server_state.js";
import { showIcons, showPreferences } from "../skeleton.js";
import { Cluster } from "./cluster.js";

const preferences = new Preferences();
const api = new Api(() => preferences.key);
const serverState = new ServerState(api);

showIcons();
showPreferences(preferences);
const cluster = new Cluster(api, serverState, preferences);

const askPreferences = (forKey) => openPreferences(preferences, () => serverState.check(true), forKey);
const renderBanner = () => showBanner(serverState, preferences, () => askPreferences(true), () => serverState.check(true));

preferences.addEventListener("change", () => {
  showPreferences(preferences);
  cluster.render();
  renderBanner();
});
serverState.addEventListener("change", () => {
  cluster.serverChanged();
  renderBanner();
});
byId("preferences").onclick = () => askPreferences(false);
await serverState.check();
