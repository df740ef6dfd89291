// Previews of HTML and SVG: in a frame with an origin of its own, which reaches neither this page nor any server.

import { make } from "../element.js";

const MARKUP = /^\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype html|html|svg|body|div|main|section|table|h[1-6]|p|style)\b/i;
const LANGUAGES = ["html", "svg", "xml", ""];

/** Whether a block of code can be shown so. @param {string} language its name, or "" */
export function canPreview(language, text) {
  return LANGUAGES.includes(language) && MARKUP.test(text);
}

export function previewOf(text, words) {
  const frame = make("iframe", { className: "preview", title: words.preview, src: new URL("frame.html", import.meta.url).href });
  frame.setAttribute("sandbox", "allow-scripts"); // frame.js alone, see its policy
  frame.onload = () => {
    frame.onload = null; // what is shown cannot have more sent to it
    frame.contentWindow.postMessage(text, "*"); // its origin has no name
  };
  return frame;
}
