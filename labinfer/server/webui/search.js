// Search: which conversations have all words of a text, in their title or in one message.

/** @returns {Promise<Set<string>>} their ids */
export async function search(store, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (where) => words.every((word) => where.toLowerCase().includes(word));
  const found = new Set((await store.conversations()).filter(({ title }) => has(title)).map(({ id }) => id));
  await store.everyMessage(({ conversation, content }) => has(content) && found.add(conversation));
  return found;
}
