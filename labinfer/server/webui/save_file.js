// File downloads.

const KEPT_MS = 60000; // time that the browser has to read the file

/** @param {Blob} blob @param {string} name proposed file name */
export function saveFile(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), KEPT_MS);
}
