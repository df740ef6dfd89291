// Previews of HTML and SVG, in a frame with an opaque origin that reaches neither this page nor any server.

import { make } from "../element.js";

const MARKUP = /^\s*(?:<\?xml[^>]*>\s*)?<(?:!doctype html|html|svg|body|div|main|section|table|h[1-6]|p|style)\b/i;
const LANGUAGES = ["html", "svg", "xml", ""];

/** Whether a code block can be previewed. @param {string} language name, or "" */
export function canPreview(language, text) {
  return LANGUAGES.includes(language) && MARKUP.test(text);
}

export function previewOf(text, words) {
  const frame = make("iframe", { className: "preview", title: words.preview, src: new URL("frame.html", import.meta.url).href });
  frame.setAttribute("sandbox", "allow-scripts"); // scripts are allowed for frame.js, the only script of the policy
  frame.onload = () => {
    frame.onload = null; // the markup is sent only once
    frame.contentWindow.postMessage(text, "*"); // "*", as an opaque origin has no name
  };
  return frame;
}
