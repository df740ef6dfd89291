"""PairText: a query and a document as one prompt, by which rerankers score the document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from labinfer.base.errors import UserError
from labinfer.text.tokenizer import Tokenizer

ROLES = ("query", "document")
"""Roles of the two messages in chat templates for rerankers, as in sentence-transformers and vLLM."""


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """Template of a reranker; prefix, middle and suffix are tokenized one by one.

    Args:
        middle: Python format with ``instruction``, ``query`` and ``document``.
    """

    prefix: str
    middle: str
    suffix: str
    instruction: str
    """Default instruction."""

    def encode(self, tokenizer: Tokenizer, pair: PairText, document: str, max_tokens: int) -> list[int]:
        """Token ids of a pair with ``document`` in place of the pair's own."""
        values = {"instruction": pair.instruction or self.instruction, "query": pair.query, "document": document}
        prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in (self.prefix, self.suffix))
        middle = tokenizer.encode_within(self.middle.format(**values), max_tokens, add_special_tokens=False)
        return [*prefix, *middle, *suffix]


PAIR_TEMPLATES = {
    "qwen3": PairTemplate(
        prefix="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        middle="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    )
}
"""Templates by name. The text of ``qwen3`` is that of Qwen3-Reranker's model card (example for Transformers)."""


class PairText(msgspec.Struct, frozen=True, kw_only=True):
    """A query and a document before they are tokenized.

    The prompt is made by the template that is named, else by a chat template that reads the roles ``query`` and ``document``, else
    the tokenizer encodes both texts as a pair, as for Transformers' cross-encoders.
    """

    query: str
    document: str
    instruction: str = ""
    """Task in words, for templates that read one; empty for the default."""
    template: str = ""
    """Key of ``PAIR_TEMPLATES``; empty for none."""
    limit: int = 0
    """Maximum number of tokens; the document is cut to it, never the text after it. 0 for no cut."""

    def encode(self, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
        """Token ids of the prompt.

        Args:
            max_tokens: maximum prompt length of the model, as in ``Tokenizer.encode_within``.

        Raises:
            UserError: the pair is too long, ``limit`` leaves no token for the document, or no template reads the instruction.
        """
        encode = self._encoder(tokenizer, max_tokens)
        if not self.limit:
            return encode(self.document)
        start = self.document[: self.limit * tokenizer.longest_token]
        own = tokenizer.encode(start, add_special_tokens=False)[: self.limit]
        document = self.document if len(own) < self.limit else tokenizer.decode(own)
        while document and len(ids := encode(document)) > self.limit:
            own = own[: max(0, len(own) - (len(ids) - self.limit))]
            document = tokenizer.decode(own).rstrip("\ufffd")
        if not document:
            raise UserError(
                f"truncate_prompt_tokens {self.limit} leaves no room for the document: without its document, the prompt has "
                f"{len(encode(''))} tokens; choose more, or shorten the query"
            )
        return ids

    def _encoder(self, tokenizer: Tokenizer, max_tokens: int) -> Callable[[str], list[int]]:
        """Function from the text of a document to the token ids of the prompt."""
        if self.template:
            template = PAIR_TEMPLATES[self.template]
            return lambda document: template.encode(tokenizer, self, document, max_tokens)
        if tokenizer.template_mentions(*ROLES):
            return lambda document: tokenizer.encode_within(self._render(tokenizer, document), max_tokens, False)
        if self.instruction:
            raise UserError("instruction: this model has no template that reads an instruction; leave it out")

        def encode_pair(document: str) -> list[int]:
            for text in (self.query, document):
                tokenizer.check_length(text, max_tokens)
            return tokenizer.encode_pair(self.query, document)

        return encode_pair

    def _render(self, tokenizer: Tokenizer, document: str) -> str:
        """Text of the pair by the chat template."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        pair = zip(ROLES, (self.query, document), strict=True)
        return tokenizer.render_chat([*system, *({"role": role, "content": text} for role, text in pair)])
