// Export and import of conversations as files.

import { openDialog } from "./dialog.js";
import { make } from "./element.js";
import { fromJson, toJson } from "./exchange.js";
import { saveFile } from "./save_file.js";

/** Download conversations as a file. @param {object[]} records */
export async function exportRecords(store, records) {
  const whole = await Promise.all(records.map(async (record) => ({ record, messages: await store.messages(record.id) })));
  saveFile(new Blob([toJson(whole)], { type: "application/json" }), `labinfer-${new Date().toISOString().slice(0, 10)}.json`);
}

/** Import the conversations of a file; shows a dialog on failure. @param {import("./chat.js").Chat} chat @returns {Promise<number>} number of conversations */
export async function importFile(chat, file) {
  const { words } = chat;
  try {
    const conversations = fromJson(await file.text());
    await chat.take(conversations);
    return conversations.length;
  } catch (error) {
    openDialog(words.import, [make("p", {}, words.importFailed), make("p", { className: "hint" }, error.message)], [{ label: words.close, run() {} }], words.close);
    return 0;
  }
}
