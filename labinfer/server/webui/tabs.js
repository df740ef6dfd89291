// Tabs: what other tabs of this browser do with the same conversations.

const CHANNEL = "labinfer";

export class Tabs {
  /**
   * @param {() => Iterable<string>} answering ids of the conversations that this tab is getting answers for
   * @param {(id: string) => void} onchange another tab has changed or removed this conversation
   */
  constructor(answering, onchange) {
    this._channel = new BroadcastChannel(CHANNEL);
    /** Ids of the conversations that are being answered in other tabs. */
    this.answering = new Set();
    this._channel.onmessage = ({ data }) => {
      if (data.asks) return this._tellAll(answering(), true);
      if (data.answering) this.answering.add(data.id);
      else this.answering.delete(data.id);
      onchange(data.id);
    };
    addEventListener("pagehide", () => this._tellAll(answering(), false));
    this._channel.postMessage({ asks: true });
  }

  /** This tab has changed a conversation, and is or is not getting an answer for it. */
  tell(id, answering) {
    this._channel.postMessage({ id, answering });
  }

  _tellAll(ids, answering) {
    for (const id of ids) this.tell(id, answering);
  }
}
