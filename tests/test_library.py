"""``LLM`` as scripts and notebooks use it: Ctrl-C, threads, iterators, forks, and what is left of one that is closed."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, mixed_prompts, transformers_greedy

import labinfer
from labinfer import LLM, SamplingParams, StructuredOutputs, UserError

SMALL = {"block_size": 4, "num_kv_blocks": 400, "max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1}
PROMPTS = mixed_prompts(4)
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
CHAT = [{"role": "user", "content": "the lazy dog"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("library") / "model", "llama-untied")


@pytest.fixture(scope="module")
def expected(checkpoint):
    return [answer["token_ids"] for answer in transformers_greedy(checkpoint, PROMPTS, NUM_TOKENS)]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), **SMALL) as llm:
        yield llm


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_is_idle_and_right(llm, expected) -> None:
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("place", ["launch", "wait_result", "prompt", "delta"])
def test_interrupt_leaves_an_llm_that_can_be_used(llm, expected, place, monkeypatch):
    calls = []

    def interrupt(*given) -> None:
        calls.append(given)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)

    owner, name = (llm.inputs, "read") if place == "prompt" else (llm._executor, place)
    with monkeypatch.context() as patched:
        if place != "delta":
            usual = getattr(owner, name)
            patched.setattr(owner, name, lambda *given, **fields: (interrupt(), usual(*given, **fields))[1])
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, on_delta=interrupt if place == "delta" else None)
    assert len(calls) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_is_idle_and_right(llm, expected)


def test_threads_take_turns(llm, expected):
    outputs: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda n=n: outputs.update({n: llm.generate(PROMPTS[n], GREEDY)})) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outputs[n][0].token_ids for n in range(4)] == expected


def test_event_loop_runs_generate_in_threads(llm, expected):
    async def run() -> list:
        return await asyncio.gather(*(asyncio.to_thread(llm.generate, prompt, GREEDY) for prompt in PROMPTS))

    assert [outputs[0].token_ids for outputs in asyncio.run(run())] == expected


def test_stream_is_an_iterator_over_the_growth_of_answers(llm, expected):
    streamed: list[list[int]] = [[] for _ in PROMPTS]
    for delta in llm.stream(PROMPTS, GREEDY):
        streamed[delta.key] += delta.token_ids
    assert streamed == expected
    with pytest.raises(UserError, match="cannot stream"):
        next(llm.stream(PROMPTS, SamplingParams(num_beams=2)))
    for _ in llm.stream(PROMPTS, GREEDY):
        break
    assert_is_idle_and_right(llm, expected)


def test_iterator_that_is_left_open_makes_way(llm, expected):
    """As a notebook leaves one whose loop was interrupted: the traceback keeps it."""
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    with pytest.raises(UserError, match="a later call on this LLM has ended this iterator"):
        next(stream)
    left = []
    thread = threading.Thread(target=lambda: left.append(llm.stream(PROMPTS, GREEDY)) or next(left[0]))
    thread.start()
    thread.join()
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    assert_is_idle_and_right(llm, expected)


def test_call_from_within_a_call_is_an_error(llm, expected):
    with pytest.raises(UserError, match="cannot be called from within its own callback"):
        llm.generate(PROMPTS, GREEDY, on_delta=lambda delta: llm.generate(PROMPTS[0], GREEDY))
    assert_is_idle_and_right(llm, expected)


def test_chat_takes_one_conversation_or_several(llm):
    whole = llm.generate([CHAT, {"messages": CHAT}], GREEDY)
    assert tokens(llm.chat(CHAT, GREEDY)) == tokens(whole[:1])
    assert tokens(llm.chat([CHAT, CHAT], GREEDY)) == tokens(whole)
    assert llm.chat([], GREEDY) == []
    for wrong in (None, "hi", ["hi"], CHAT[0]):
        with pytest.raises(UserError, match="messages must be a list of messages"):
            llm.chat(wrong, GREEDY)
    with pytest.raises(UserError, match="no key 'tool'"):
        llm.chat(CHAT, GREEDY, tool=[])


def test_structured_outputs_may_be_a_dictionary(llm):
    assert SamplingParams(structured_outputs={"choice": ["a"]}).structured_outputs == StructuredOutputs(choice=("a",))
    with pytest.raises(UserError, match="structured_outputs has no field 'schema'; its fields are json, "):
        SamplingParams(structured_outputs={"schema": {}})
    (output,) = llm.generate("the", SamplingParams(structured_outputs={"regex": "[0-3]{4}"}))
    assert len(output.text) == 4 and set(output.text) <= set("0123")


def test_torch_dtypes_are_taken(checkpoint):
    with LLM(checkpoint, dtype=torch.float16, kv_cache_dtype=torch.float32, device=torch.device("cpu"), **SMALL) as llm:
        assert (llm.layout.dtype(llm.place), llm.layout.kv_dtype(llm.place)) == (torch.float16, torch.float32)


def test_closed_llm_says_so_and_holds_no_weights(checkpoint):
    llm = LLM(checkpoint, **SMALL)
    runner = weakref.ref(llm._parts.worker.runner)
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("the"), lambda: llm.stream("the"), lambda: llm.embed("the"), llm.follow):
        with pytest.raises(UserError, match="this LLM is closed; make a new LLM"):
            call()
    gc.collect()
    assert runner() is None


@pytest.mark.parametrize("makes_another", [False, True])
def test_fork_after_use_is_an_error(llm, checkpoint, makes_another):
    llm.generate(PROMPTS, GREEDY)
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def child() -> None:
        try:
            (LLM(checkpoint, **SMALL) if makes_another else llm).generate(PROMPTS[0], GREEDY)
        except UserError as error:
            said.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert said.get().startswith(f"this process was forked from process {os.getpid()} after an LLM was used there")


def test_dir_shows_what_users_need():
    code = "import sys, labinfer; print(*dir(labinfer)); from labinfer import *; print(LLM.__name__, AsyncLLM.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, loaded = done.stdout.splitlines()
    public = [name for name in names.split() if not name.startswith("_")]
    assert public == sorted(labinfer.MODULES) and loaded == "LLM AsyncLLM"
    assert {"LLM", "AsyncLLM", "SamplingParams", "StructuredOutputs", "UserError"} < set(public)


def threads_and_files() -> tuple[int, int]:
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("num_rounds", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_opening_and_closing_leaves_nothing_behind(checkpoint, num_rounds):
    """On several ranks: ``tests/dist/test_open_close.py``."""
    counts = []
    for _ in range(num_rounds):
        with LLM(checkpoint, **SMALL) as llm:
            llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
        gc.collect()
        counts.append(threads_and_files())
    assert counts[-1] == counts[2], counts


def test_memory_of_a_model_is_freed_without_collecting_garbage(checkpoint):
    """Otherwise the next model is loaded beside the weights of the last one."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(checkpoint, **SMALL)
        llm.generate(PROMPTS[0], GREEDY)
        runner = weakref.ref(llm._parts.worker.runner)
        del llm
        assert runner() is None
    finally:
        gc.enable()
