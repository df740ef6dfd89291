// Markdown of an answer as DOM nodes. Model output is untrusted: DOMPurify keeps only the tags below, and
// other raw HTML is shown as text.

import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import { Marked } from "./vendor/marked/marked.esm.js";
import { chineseStrong } from "./chinese_strong.js";
import { highlight } from "./highlight.js";
import { blockMath, inlineMath, renderMath } from "./math.js";

const ALLOWED_TAGS = [
  "a", "b", "blockquote", "br", "code", "dd", "del", "details", "div", "dl", "dt", "em", "h3", "h4", "h5", "h6", "hr", "i",
  "img", "ins", "kbd", "li", "mark", "ol", "p", "pre", "q", "s", "small", "span", "strong", "sub", "summary", "sup", "table",
  "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul",
];
const ALLOWED_ATTR = ["align", "alt", "class", "colspan", "data-language", "data-math", "data-tex", "href", "open", "rowspan", "src", "start", "target", "rel"];
const NOT_AN_ADDRESS = ["align", "colspan", "data-language", "data-math", "data-tex", "open", "rel", "rowspan", "start", "target"];
const RAW_TAGS = new Set(ALLOWED_TAGS.filter((tag) => tag !== "a" && tag !== "img"));
const LONG_CODE = 20000; // maximum number of characters of code that is highlighted

const marked = new Marked({
  gfm: true,
  extensions: [blockMath, inlineMath, chineseStrong],
  renderer: {
    code({ text, lang }) {
      const language = (lang ?? "").trim().split(/\s+/)[0].toLowerCase().replace(/[^\w+#-]/g, "");
      const colored = (text.length < LONG_CODE && highlight(text, language)) || escape(text);
      return `<pre data-language="${language}"><code>${colored}\n</code></pre>`;
    },
    heading({ tokens, depth }) { // h1 and h2 are reserved for the page
      const tag = `h${Math.min(6, depth + 2)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    html({ text, block }) {
      const shown = text.replace(/<!--[\s\S]*?-->/g, "").split(/(<[^<>]*>)/).map(rawTag).join("");
      return block && shown.trim() && !shown.includes("<") ? `<p>${shown}</p>` : shown; // all HTML was escaped
    },
    image({ href, text }) { // only images in data URLs, so that nothing is fetched from other servers
      if (href.startsWith("data:image/")) return `<img src="${escape(href)}" alt="${escape(text)}">`;
      return `<a href="${escape(href)}">${escape(text || href)}</a>`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  const colors = [...node.classList].filter((name) => name.startsWith("hljs-")); // a model must not use classes of the page
  if (colors.length) node.className = colors.join(" ");
  else node.removeAttribute("class");
  if (node.tagName === "IMG" && !node.getAttribute("src")?.startsWith("data:image/")) node.remove();
});

/**
 * Render a complete text.
 * @param {string} text
 * @param {(pre: HTMLElement) => Node} frameCode wraps a code block in a frame
 * @returns {DocumentFragment}
 */
export function renderMarkdown(text, frameCode) {
  return toNodes(marked.parse(text), frameCode);
}

function toNodes(html, frameCode) {
  const nodes = DOMPurify.sanitize(html, {
    ALLOWED_TAGS, ALLOWED_ATTR, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
    ADD_URI_SAFE_ATTR: NOT_AN_ADDRESS, ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/|#)/i,
  });
  for (const pre of nodes.querySelectorAll("pre")) frameCode(pre);
  for (const table of nodes.querySelectorAll("table")) { // wide tables scroll inside a frame
    const frame = document.createElement("div");
    frame.className = "wide";
    frame.tabIndex = 0; // scrollable by keyboard
    frame.setAttribute("role", "group");
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const place of nodes.querySelectorAll("[data-math]")) renderMath(place);
  return nodes;
}

/** GrowingMarkdown: an answer during generation. Complete blocks are rendered once, the last block on every change. */
export class GrowingMarkdown {
  constructor(container, frameCode) {
    this._container = container;
    this._frameCode = frameCode;
    this._settled = 0; // characters in complete blocks
    this._open = []; // nodes of the last block
  }

  /** @param {string} text the whole text, which only grows */
  show(text) {
    const tokens = marked.lexer(text.slice(this._settled));
    while (tokens.at(-1)?.type === "space") tokens.pop();
    const complete = tokens.slice(0, -1);
    for (const node of this._open) node.remove();
    if (complete.length) {
      const raw = complete.map((token) => token.raw).join("");
      this._container.append(renderMarkdown(raw, this._frameCode));
      this._settled += raw.length;
    }
    const before = this._container.childNodes.length;
    this._container.append(renderMarkdown(text.slice(this._settled), this._frameCode));
    this._open = [...this._container.childNodes].slice(before);
  }

  /** Render the complete text once more: blocks may depend on later ones, such as links that are defined below. */
  finish(text) {
    const whole = renderMarkdown(text, this._frameCode);
    const unfolded = [...this._container.querySelectorAll("details")].map((one) => one.open); // which <details> are open
    whole.querySelectorAll("details").forEach((one, index) => { one.open = unfolded[index] ?? false; });
    const blocks = [...this._container.children], wanted = [...whole.children];
    if (blocks.length !== wanted.length) this._container.replaceChildren(whole);
    else wanted.forEach((one, index) => { if (!blocks[index].isEqualNode(one)) blocks[index].replaceWith(one); });
  }
}

/** Allowed tags without attributes; any other "<" becomes text. */
function rawTag(piece) {
  const [, slash, name] = /^<(\/?)([a-z][a-z0-9]*)[^<>]*>$/i.exec(piece) ?? [];
  return RAW_TAGS.has(name?.toLowerCase()) ? `<${slash}${name}>` : piece.replace(/</g, "&lt;");
}

function escape(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
