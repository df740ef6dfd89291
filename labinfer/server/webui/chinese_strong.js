// **Strong** text next to Chinese characters. CommonMark (6.2, flanking) requires a space between "**" and a letter if a
// punctuation mark is on the other side. Chinese has no spaces, so that **注意：**这里 would not be strong.

const STRONG = /^\*\*(?=\p{P}|[^*\n]*\p{P}\*\*)(?!\s)([^*\n]+?)(?<!\s)\*\*(?!\*)/u;

/** Extension of marked. */
export const chineseStrong = {
  name: "chineseStrong",
  level: "inline",
  start: (text) => (text.includes("**") ? text.indexOf("**") : undefined),
  tokenizer(text) {
    const found = STRONG.exec(text);
    if (!found) return undefined;
    return { type: "strong", raw: found[0], text: found[1], tokens: this.lexer.inlineTokens(found[1]) };
  },
};
