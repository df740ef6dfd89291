// The banner that says why the server does not answer; hidden while the server answers.

import { byId, make } from "./element.js";

/** @param {object|null} wait stalled ranks, see `ServerState` @param {() => void} onkey opens the API key field @param {() => void} onretry */
export function showBanner({ trouble, wait }, preferences, onkey, onretry) {
  const { words } = preferences, banner = byId("banner");
  banner.hidden = !trouble && !wait;
  const texts = {
    away: words.away, loading: words.loading, draining: words.draining,
    key: preferences.key ? words.keyRefused : words.keyWanted, failed: words.failed(""),
  };
  const [label, onclick] = trouble === "key" ? [words.enterKey, onkey] : [words.tryNow, onretry];
  banner.replaceChildren(make("span", {}, wait ? words.rankWaits(wait) : texts[trouble] ?? ""), make("button", { type: "button", className: "quiet", onclick }, label));
}
