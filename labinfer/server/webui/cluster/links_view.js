// LinksView: traffic between ranks.

import { byId, make } from "../element.js";
import { table } from "./table.js";
import { bytes, duration } from "./units.js";

export class LinksView {
  /** @param {HTMLElement} section hidden without traffic */
  constructor(section) {
    this._section = section;
  }

  /** @param {object[]} links from `/v1/cluster` or the latest stats @param {object} cluster response of `/v1/cluster` */
  render(links, cluster, words) {
    this._section.hidden = links.length === 0;
    const hostOf = (rank) => cluster.ranks.find((one) => one.rank === rank)?.host ?? "";
    const rows = links.map(({ source, destination, bytes_sent, bytes_per_second, bytes_per_step }) => {
      const hosts = [hostOf(source), hostOf(destination)], isFar = hosts[0] !== hosts[1];
      return make("tr", {},
        make("th", { scope: "row" }, words.link(source, destination), ...(isFar ? [make("span", { className: "more" }, hosts.join(" → "))] : [])),
        ...[bytes_per_second === null ? "–" : `${bytes(bytes_per_second)}/s`, bytes_per_step === null ? "–" : bytes(bytes_per_step), bytes(bytes_sent)]
          .map((text) => make("td", {}, text)));
    });
    const place = byId("links-table");
    const { scrollLeft } = place;
    place.replaceChildren(table(words.links, ["link", "rate", "perStep", "inAll"].map((name) => words.columns[name]), rows));
    place.scrollLeft = scrollLeft;
    byId("links-say").textContent = cluster.stage_latency_seconds ? words.stageLatency(duration(cluster.stage_latency_seconds * 1e6)) : "";
  }
}
