// Tabs: tells other tabs of this browser, which share the stored conversations, of changes.

const CHANNEL = "labinfer";

export class Tabs {
  /**
   * @param {() => Iterable<string>} answering returns the ids of conversations for which this tab receives answers
   * @param {(id: string) => void} onchange called when another tab has changed or deleted a conversation
   */
  constructor(answering, onchange) {
    this._channel = new BroadcastChannel(CHANNEL);
    /** Ids of conversations for which other tabs receive answers. */
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

  /** Notify other tabs of a changed conversation. @param {boolean} isAnswering whether this tab receives an answer in it */
  tell(id, answering) {
    this._channel.postMessage({ id, answering });
  }

  _tellAll(ids, answering) {
    for (const id of ids) this.tell(id, answering);
  }
}
