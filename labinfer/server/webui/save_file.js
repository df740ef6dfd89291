// Giving the user a file.

const KEPT_MS = 60000; // until the browser has surely read it

/** @param {Blob} blob @param {string} name it is proposed under */
export function saveFile(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
}
