"""InputProcessor: makes engine requests from prompts; tokenizes texts and conversations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from labinfer.base.errors import UserError
from labinfer.base.sampling_params import SamplingParams
from labinfer.base.structured_outputs import StructuredOutputs
from labinfer.engine.constraints import THINKING_BUDGET
from labinfer.engine.request import Request
from labinfer.requests.prompts import (
    THINKING_SWITCHES,
    ChatPrompt,
    PairPrompt,
    Prompt,
    PromptLike,
    TextPrompt,
    TokensPrompt,
    parse_prompt,
)
from labinfer.text.grammar_sandbox import GrammarSandbox
from labinfer.text.reply_grammar import before_form, forced_calls
from labinfer.text.tokenizer import Tokenizer
from labinfer.text.tokenizing import PromptText, TokenizingProcess
from labinfer.text.tools import ToolUse

EFFORT, VERBOSITY = "reasoning_effort", "verbosity"
"""Names of the chat template variables that set the length of the reasoning and the length of the answer."""


class InputProcessor:
    """Makes engine requests from prompts, with the tokenizer and chat template of one checkpoint.

    Args:
        directory: directory of the tokenizer.
        required: whether a directory without a tokenizer is an error; if not, only prompts that need a tokenizer are refused.
        response_template: format of chat replies; see ``choose_format``.
        max_prompt_tokens: maximum prompt length; much longer prompts are refused before they are tokenized.
        chat_template: file that replaces the checkpoint's chat templates; empty for none.

    Raises:
        UserError: the tokenizer is missing or invalid, or one of the templates is unusable.
    """

    def __init__(
        self,
        directory: Path,
        required: bool,
        response_template: str = "",
        max_prompt_tokens: int = sys.maxsize,
        chat_template: str = "",
    ):
        self._max_prompt_tokens = max_prompt_tokens
        self.tokenizer: Tokenizer | None = None
        self._error: UserError | None = None
        try:
            self.tokenizer = Tokenizer(directory, response_template, chat_template)
        except UserError as error:
            if required or response_template or chat_template:
                raise
            self._error = error
        self._sandbox = GrammarSandbox(self.need_tokenizer)
        self.tokenizing = TokenizingProcess(
            directory, response_template, max_prompt_tokens, chat_template, self.tokenizer_digest
        )
        """Helper process that tokenizes long prompts: tokenizing them in this process would block other requests."""

    def process(
        self,
        key: Any,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        token_ids: list[int] | None = None,
        **fields: Any,
    ) -> Request:
        """Make the engine request of a prompt.

        Args:
            token_ids: token ids of ``prompt``, if they are known already; ``Request.prompt`` is then None.
            fields: further fields of the ``Request``, such as ``cache_salt``, ``priority`` and ``user``.

        Raises:
            UserError: the prompt cannot be tokenized.
        """
        text: str | None = None
        if token_ids is None:
            text, token_ids = self._encode(prompt)
        if sampling.stop:
            self.need_tokenizer()
        before, continues_message = "", False
        if isinstance(prompt, ChatPrompt):
            continues_message = bool(prompt.template_use.continue_final_message)
            if prompt.tool_use.is_forced:
                sampling, fields["form_field"] = self._force_call(prompt.tool_use, sampling), "tools"
            if prompt.thinking_budget is not None:
                sampling = self._bound_reasoning(token_ids, prompt, sampling)
            if sampling.structured_outputs is not None:
                before = self._before_form(token_ids, prompt.tool_use)
        return Request(
            key=key,
            prompt_token_ids=token_ids,
            sampling=sampling,
            prompt=text,
            bad_token_ids=self._encode_bad_words(sampling.bad_words),
            is_chat=isinstance(prompt, ChatPrompt),
            continues_message=continues_message,
            before_form=before,
            **fields,
        )

    def read(self, key: Any, given: PromptLike, sampling: SamplingParams, **fields: Any) -> Request:
        """Make the engine request of a prompt in any form that Python callers may use (``PromptLike``), and check its
        structured-output grammar. Not thread-safe.

        Args:
            fields: as in ``process``; values in a dictionary prompt take precedence.

        Raises:
            UserError: the prompt or the grammar is invalid.
        """
        prompt, extras = parse_prompt(given)
        request = self.process(key, prompt, sampling, **fields | extras)
        self.check_grammar(request)
        return request

    def check_grammar(self, request: Request) -> None:
        """Check the structured-output grammar of a request, if the request has one. May take a second.

        Raises:
            UserError: the grammar is invalid or too costly.
        """
        if request.sampling.structured_outputs is not None:
            self._sandbox.check(request.sampling.structured_outputs, request.before_form, request.form_field)

    def is_grammar_known(self, request: Request) -> bool:
        """Whether ``check_grammar`` would return at once, because the request has no grammar, or the result for the grammar is
        cached.

        Raises:
            UserError: the checkpoint has no tokenizer, which grammars need.
        """
        form = request.sampling.structured_outputs
        return form is None or self._sandbox.is_known(form, request.before_form)

    def close(self) -> None:
        """End the helper processes, if they are running."""
        self._sandbox.close()
        self.tokenizing.close()

    def _force_call(self, tool_use: ToolUse, sampling: SamplingParams) -> SamplingParams:
        """Copy of ``sampling`` whose structured output is the grammar of the tool calls that ``tool_choice`` forces."""
        if sampling.structured_outputs is not None:
            raise UserError(
                "tool_choice forces a tool call and cannot be combined with structured_outputs or "
                "response_format; leave one out"
            )
        tokenizer = self.need_tokenizer()
        form = tokenizer.reply_format and tokenizer.reply_format.call
        if form is None:
            raise UserError(
                f"tool_choice {tool_use.tool_choice!r:.60} cannot be forced: the format of this model's tool calls is unknown; "
                'use "auto", or give --response-template'
            )
        grammar = forced_calls(tool_use, form, tokenizer.added_tokens)
        return msgspec.structs.replace(sampling, structured_outputs=StructuredOutputs(grammar=grammar))

    def _bound_reasoning(self, token_ids: list[int], prompt: ChatPrompt, sampling: SamplingParams) -> SamplingParams:
        """Copy of ``sampling`` with a logits processor that limits the reasoning to the prompt's ``thinking_budget``. Returns
        ``sampling`` itself if no special token ends the model's reasoning."""
        tokenizer = self.need_tokenizer()
        delimiters = tokenizer.reply_format and tokenizer.reply_format.reasoning
        parser = tokenizer.reply_parser(token_ids, [])
        if delimiters is None or parser is None or (parser.has_reasoned and not parser.is_reasoning):
            return sampling
        call, marks = tokenizer.reply_format.call, frozenset(tokenizer.added_tokens.values())
        may_call = prompt.tool_use.offered and call is not None
        opening, closing, call_ids = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (delimiters.open, delimiters.close, (call.begin or call.text) if may_call else "")
        )
        if closing[0] not in marks:
            return sampling
        calls = [token for token in call_ids[:1] if token in marks]
        own = [prompt.thinking_budget, [] if parser.is_reasoning else opening, closing, calls]
        budget = {
            THINKING_BUDGET: own
        }  # before and after the other processors: one that keeps only likely tokens would mask the closing token
        return msgspec.structs.replace(sampling, logits_processors=budget | sampling.logits_processors | budget)

    def _before_form(self, prompt_token_ids: list[int], tool_use: ToolUse) -> str:
        """Grammar rules for the text that may precede the structured output of a chat reply, such as reasoning; "" for
        none."""
        tokenizer = self.need_tokenizer()
        parser = tokenizer.reply_parser(prompt_token_ids, tool_use.offered)
        if parser is None:
            return ""
        return before_form(
            tokenizer.reply_format, parser, tokenizer.may_think, tokenizer.added_tokens, for_call=tool_use.is_forced
        )

    def _template_kwargs(self, prompt: ChatPrompt) -> dict[str, Any]:
        """Variables that a conversation passes to the chat template; see ``TemplateUse``."""
        variables = dict(prompt.template_use.chat_template_kwargs or {})
        effort, verbosity = prompt.template_use.reasoning_effort, prompt.template_use.verbosity
        if effort is None and verbosity is None and not variables:
            return {}
        tokenizer, tools = self.need_tokenizer(), prompt.tool_use.offered
        if verbosity is not None and tokenizer.template_reads(VERBOSITY, tools):
            variables.setdefault(VERBOSITY, verbosity)
        unread = [name for name in (EFFORT, *THINKING_SWITCHES) if not tokenizer.template_reads(name, tools)]
        for name in unread:  # dropped, not refused: clients also send it to models without reasoning
            variables.pop(name, None)
        if effort is None:
            return variables
        reads_effort = EFFORT not in unread
        switches = [name for name in THINKING_SWITCHES if name not in unread]
        known = {EFFORT: effort} if reads_effort else {}
        if effort == "none" or not reads_effort:
            known |= dict.fromkeys(switches, effort != "none")
        return known | variables

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            UserError: the prompt cannot be tokenized.
        """
        return self._encode(prompt)[1]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt; the text is None if the prompt was given as token ids or as a pair."""
        if isinstance(prompt, TokensPrompt):
            return None, prompt.token_ids
        if isinstance(prompt, PairPrompt):
            return None, self.encode_text(self.prompt_text(prompt))
        source, tokenizer = self.prompt_text(prompt), self.need_tokenizer()
        text = source.render(tokenizer)
        return text, source.encode_rendered(text, tokenizer, self._max_prompt_tokens)

    def encode_text(self, text: PromptText) -> list[int]:
        """Token ids of a prompt that ``prompt_text`` has prepared."""
        return text.encode(self.need_tokenizer(), self._max_prompt_tokens)

    def prompt_text(self, prompt: TextPrompt | ChatPrompt | PairPrompt) -> PromptText:
        """Prepare a prompt for the tokenizer, as an object that can be passed to another process.

        Raises:
            UserError: the prompt is empty, or the chat template does not support its content.
        """
        if isinstance(prompt, ChatPrompt):
            variables = self._template_kwargs(prompt)
            return PromptText(
                messages=prompt.messages,
                tools=prompt.tool_use.offered,
                template_kwargs=variables,
                ending=prompt.template_use.ending,
            )
        if isinstance(prompt, PairPrompt):
            return PromptText(pair=prompt.pair)
        if not prompt.text:
            raise UserError("the prompt is empty; give at least one token")
        if not prompt.limit:
            self.need_tokenizer().check_length(prompt.text, self._max_prompt_tokens)
        return PromptText(text=prompt.text, limit=prompt.limit)

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each of ``words``, with and without a leading space, as a word may be inside a text or at the beginning of a
        text."""
        if not words:
            return ()
        encode = self.need_tokenizer().encode
        spelled = (
            prefix + (word.lstrip(" ") or word) for word in words for prefix in ("", " ") if word.strip() or not prefix
        )
        return tuple({ids: None for text in spelled if (ids := tuple(encode(text, add_special_tokens=False)))})

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer's files; empty without a tokenizer."""
        return self.tokenizer.digest if self.tokenizer is not None else ""

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, for a prompt or a request that needs it.

        Raises:
            UserError: the checkpoint has no tokenizer.
        """
        if self.tokenizer is None:
            raise self._error
        return self.tokenizer


def pair_prompts(prompts: Any, params: Any) -> list[tuple[PromptLike, SamplingParams]]:
    """Pair prompts with sampling parameters. ``prompts`` may be one prompt or a list, and ``params`` one object or a list, as in
    ``LLM.generate``.

    Raises:
        UserError: a value has a wrong type, or the lists differ in length.
    """
    if prompts is None:
        raise UserError("rank 0 needs prompts; only the other ranks may pass None")
    if not isinstance(prompts, (str, dict, list, tuple)):
        raise UserError(f"prompts must be one prompt or a list of prompts, not {prompts!r:.80}")
    if isinstance(prompts, (str, dict)) or _is_one_prompt(prompts):
        prompts = [prompts]
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if not isinstance(params, (list, tuple)) or not all(isinstance(item, SamplingParams) for item in params):
        raise UserError(
            f"sampling_params must be SamplingParams, one for all prompts or a list of them, not {params!r:.80}"
        )
    if len(params) != len(prompts):
        raise UserError(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one, or one per prompt")
    return list(zip(prompts, params, strict=True))


def conversations(messages: Any, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the messages of one conversation, or of a list of conversations, to dictionary prompts.

    Args:
        fields: further fields that every prompt gets.

    Raises:
        UserError: ``messages`` has a wrong type.
    """
    is_one = not isinstance(messages, list) or any(isinstance(each, dict) for each in messages)
    several = [messages] if is_one else messages
    if not all(isinstance(each, list) for each in several):
        raise UserError(f"messages must be a list of messages, or a list of such lists, not {messages!r:.80}")
    return [{**fields, "messages": each} for each in several]


def _is_one_prompt(prompts: list | tuple) -> bool:
    """Whether a list is one prompt (token ids, or the messages of a conversation) rather than a list of prompts."""
    first = prompts[0] if prompts else None
    return isinstance(first, int) or (isinstance(first, dict) and "role" in first)
