// **Strong** text beside Chinese. CommonMark's rule (6.2, "flanking") wants a space between "**" and a letter where a
// punctuation mark stands on the other side, and Chinese has no spaces: **注意：**这里 would keep its stars.

const STRONG = /^\*\*(?=\p{P}|[^*\n]*\p{P}\*\*)(?!\s)([^*\n]+?)(?<!\s)\*\*(?!\*)/u;

/** For marked. */
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
