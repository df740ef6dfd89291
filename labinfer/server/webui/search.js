// Search: finds the conversations that have all words of a query in the title or in one message.

/** @returns {Promise<Set<string>>} conversation ids */
export async function search(store, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (where) => words.every((word) => where.toLowerCase().includes(word));
  const ids = new Set((await store.conversations()).filter(({ title }) => has(title)).map(({ id }) => id));
  await store.everyMessage(({ conversation, content }) => has(content) && ids.add(conversation));
  return ids;
}
