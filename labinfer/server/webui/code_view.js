// Frame around a code block, with its language, a copy button and a preview button.

import { copy } from "./clipboard.js";
import { icon } from "./icon.js";
import { make } from "./element.js";
import { canPreview, previewOf } from "./preview/preview.js";

/** Wrap `pre` in a frame, in place. */
export function frameCode(pre, words) {
  const text = pre.textContent.replace(/\n$/, "");
  const button = make("button", { type: "button", className: "quiet copy" }, icon("copy"), make("span", {}, words.copy));
  button.onclick = async () => {
    await copy(text);
    button.lastChild.textContent = words.copied;
    setTimeout(() => (button.lastChild.textContent = words.copy), 1500);
  };
  const language = pre.dataset.language ?? "";
  const head = make("div", { className: "code-head" }, make("span", {}, language || words.code), button);
  const frame = make("div", { className: "code" }, head);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", `${words.code} ${language}`.trim());
  pre.replaceWith(frame);
  frame.append(pre);
  if (canPreview(language, text)) button.before(previewButton(frame, text, words));
}

function previewButton(frame, text, words) {
  const button = make("button", { type: "button", className: "quiet preview-toggle", "aria-expanded": "false" }, icon("eye"), make("span", {}, words.preview));
  button.onclick = () => {
    const shown = frame.querySelector("iframe");
    if (shown) shown.remove();
    else frame.append(previewOf(text, words));
    button.setAttribute("aria-expanded", String(!shown));
  };
  return button;
}
