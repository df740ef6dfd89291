// Store: conversations, messages and attached files in IndexedDB. Each message is a record, so that saving
// one is cheap.
// All methods are async, so that exceptions of IndexedDB become rejections.

const NAME = "labinfer";
const VERSION = 2;

export class Store {
  constructor(database) {
    this._database = database;
  }

  static async open(name = NAME) {
    const request = indexedDB.open(name, VERSION);
    request.onupgradeneeded = ({ oldVersion }) => {
      if (oldVersion < 1) {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      }
      request.result.createObjectStore("attachments"); // key: conversation id
    };
    const database = await done(request);
    database.onversionchange = () => database.close(); // so that a newer version of the page in another tab can upgrade the database
    return new Store(database);
  }

  /** All conversations, latest first. */
  async conversations() {
    const records = await done(this._read("conversations").getAll());
    return records.sort((a, b) => b.updated - a.updated);
  }

  /** The record of a conversation; undefined if the id is unknown. */
  async conversation(id) {
    return done(this._read("conversations").get(id));
  }

  /** Messages of a conversation, unordered. */
  async messages(conversation) {
    return done(this._read("messages").index("conversation").getAll(conversation));
  }

  /** Files attached to the next message of a conversation. @returns {Promise<{name: string, text: string}[]>} */
  async attachments(conversation) {
    return (await done(this._read("attachments").get(conversation))) ?? [];
  }

  async keepAttachments(conversation, files) {
    return this._change("attachments", (attachments) =>
      files.length ? attachments.put(files, conversation) : attachments.delete(conversation));
  }

  async save(conversation) {
    return this._change("conversations", (conversations) => conversations.put(conversation));
  }

  async saveMessage(message) {
    return done(this._write("messages").put(message));
  }

  /** Save records of conversations and messages in one transaction. */
  async saveAll(conversations, messages) {
    const transaction = this._database.transaction(["conversations", "messages"], "readwrite");
    for (const one of conversations) transaction.objectStore("conversations").put(one);
    for (const one of messages) transaction.objectStore("messages").put(one);
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
  }

  async removeMessages(ids) {
    const messages = this._write("messages");
    await Promise.all(ids.map((id) => done(messages.delete(id))));
  }

  async remove(id) {
    await this._change("conversations", (conversations) => conversations.delete(id));
    await this.keepAttachments(id, []);
    const messages = this._write("messages");
    const keys = await done(messages.index("conversation").getAllKeys(id));
    await Promise.all(keys.map((key) => done(messages.delete(key))));
  }

  /** Call `look` with each message of all conversations. */
  async everyMessage(look) {
    const cursor = this._read("messages").openCursor();
    await new Promise((resolve, reject) => {
      cursor.onerror = () => reject(cursor.error);
      cursor.onsuccess = () => {
        if (!cursor.result) return resolve();
        look(cursor.result.value);
        cursor.result.continue();
      };
    });
  }

  _read(store) { return this._database.transaction(store).objectStore(store); }

  /** Run a transaction and commit it at once, so that it survives an immediate reload. */
  _change(name, request) {
    const store = this._write(name);
    const change = request(store);
    store.transaction.commit();
    return done(change);
  }

  _write(store) { return this._database.transaction(store, "readwrite").objectStore(store); }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}
