// Random ids. crypto.randomUUID is missing on pages loaded over plain HTTP from another machine.

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
