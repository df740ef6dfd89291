// **Strong** text next to Chinese characters. CommonMark (6.2, flanking) requires a space between "**" and a letter if a
// punctuation mark is on the other side. Chinese has no spaces, so that **注意：**这里 would not be strong.

const STRONG = /^\*\*(?=\p{P}|[^*\n]*\p{P}\*\*)(?!\s)([^*\n]+?)(?<!\s)\*\*(?!\*)/u;

/** Extension of marked. */
export const chineseStrong = {
  name: "chineseStrong",
  level: "inline",
  start: (text) => (text.includes("**") ? text.indexOf("**") : undefined),
  tokenizer(text) {
    const match = STRONG.exec(text);
    if (!match) return undefined;
    return { type: "strong", raw: match[0], text: match[1], tokens: this.lexer.inlineTokens(match[1]) };
  },
};
