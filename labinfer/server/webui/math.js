// Formulas in answers: $…$, $$…$$, \(…\) and \[…\], rendered by KaTeX, which is loaded with the first formula.

const BLOCK = /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[^\S\n]*(?:\n|$)/;
const OPEN_BLOCK = /^(?:\$\$|\\\[)[\s\S]*$/; // an incomplete formula during generation
const INLINE = /^(?:\$\$([^$]+?)\$\$|\\\(([\s\S]+?)\\\)|\\\[([\s\S]+?)\\\]|\$((?:[^\s$\\,.;:)，。；：）]|\\.)(?:(?:[^$\\\n]|\\.)*?(?:[^\s$\\]|\\.))?)\$(?!\d))/;

/** Extension of marked: block formulas. */
export const blockMath = {
  name: "blockMath",
  level: "block",
  start: (text) => text.match(/(?:^|\n)(?:\$\$|\\\[)/)?.index,
  tokenizer(text) {
    const match = BLOCK.exec(text);
    if (match) return { type: "blockMath", raw: match[0], tex: match[1] ?? match[2] };
    const open = !/\$\$[\s\S]*\$\$|\\\]/.test(text) && OPEN_BLOCK.exec(text);
    return open ? { type: "blockMath", raw: open[0], tex: null } : undefined;
  },
  renderer: ({ raw, tex }) => (tex === null ? `<p>${escape(raw)}</p>` : `<div data-math="block" data-tex="${escape(tex)}">${escape(raw)}</div>`),
};

/** Extension of marked: inline formulas. */
export const inlineMath = {
  name: "inlineMath",
  level: "inline",
  start: (text) => text.match(/\$|\\\(|\\\[/)?.index,
  tokenizer(text) {
    const match = INLINE.exec(text);
    if (!match) return undefined;
    const [raw, display, round, square, dollar] = match;
    const block = display !== undefined || square !== undefined;
    return { type: "inlineMath", raw, tex: display ?? round ?? square ?? dollar, block };
  },
  renderer: ({ raw, tex, block }) => `<span data-math="${block ? "block" : "inline"}" data-tex="${escape(tex)}">${escape(raw)}</span>`,
};

let library = null; // promise of KaTeX; null before the first formula

/** Render the formula of an element; a formula that KaTeX rejects stays as text. */
export async function renderMath(place) {
  library ??= load();
  const katex = (await library).default;
  const drawn = document.createElement(place.tagName);
  try {
    katex.render(place.dataset.tex, drawn, {
      displayMode: place.dataset.math === "block", throwOnError: true, trust: false, strict: "ignore", maxSize: 20, maxExpand: 500,
    });
  } catch {
    return;
  }
  place.replaceChildren(...drawn.childNodes);
}

function load() {
  const sheet = document.createElement("link");
  sheet.rel = "stylesheet";
  sheet.href = new URL("./vendor/katex/katex.min.css", import.meta.url).href;
  document.head.append(sheet);
  return import("./vendor/katex/katex.mjs");
}

function escape(text) {
  return text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}
