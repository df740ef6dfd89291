"""Flags and keyword arguments of vLLM, SGLang and llama.cpp: aliases of options here, or hints what to do instead."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from labinfer.base.config import SECTIONS
from labinfer.base.errors import UserError
from labinfer.base.option_fields import flag_name
from labinfer.base.sampling_params import SamplingParams

SAME_OPTIONS = {
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
}
"""Aliases of options, accepted as flags and as keywords of ``LLM``."""

GPU_LAYERS = "--device cuda, or --device cuda,cpu --layers 14,10 on two ranks"
LORA = "LoRA adapters are not supported; merge the adapter into its model (PEFT's merge_and_unload)"
REPLY_FORMAT = "the format is recognized by the chat template; --response-template NAME sets it where it is not"
EMBEDDINGS = "embeddings need no option"
CAPTURED = "decode steps are captured where the device allows it"
REPLICAS = "a server runs one replica of the model; start one server for each"
CONTEXT_PARALLEL = "context parallelism is not supported; more pipeline stages hold more KV cache"
TEXT_ONLY = "models read text only"
HUB_REVISION = "the hub's default revision is loaded; download another one, and give its directory as --model"
CONFIG_FILE = "config.json is read as it is; change it in a copy of the checkpoint's directory"
KV_TRANSFER = "the KV cache is not sent to other servers or stores"
TORCHRUN = "the launcher connects the hosts; give it to torchrun, before launch.py"
LAUNCHER = "torchrun, mpirun or srun starts the ranks"
CLIENT_CERTIFICATES = "certificates of clients are not checked; let a reverse proxy check them"
REQUEST_LOG = "requests are logged only with --log-json, and never their text"
OWN_LOAD = "bench serve loads the model itself; LABInfer's server also answers vllm bench serve"
PERCENTILES = "mean, median, p90 and p99 of TTFT, TPOT, ITL and E2EL are always shown"
CORS = "--allowed-origins allows the methods and headers that the API needs"
REPLACEMENTS = {
    "-m": "--model",
    "-p": "--prompt",
    "-n": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--n-ctx": "--max-model-len",
    "--context-length": "--max-model-len",
    "-t": "--threads",
    "--n-threads": "--threads",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-batch-size": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "-ngl": GPU_LAYERS,
    "--n-gpu-layers": GPU_LAYERS,
    "--gpu-layers": GPU_LAYERS,
    "--gpu-memory-utilization": "--memory-utilization",
    "--mem-fraction-static": "--memory-utilization",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--served-model-name": "--model NAME=DIR",
    "--enable-expert-parallel": "--experts whole",
    "--attention-backend": "--functions paged_attention=NAME",
    "-ep": "--experts whole",
    "--moe-backend": "--functions experts=NAME",
    "--kv-cache-memory-bytes": "--num-kv-blocks",
    "--mamba-block-size": "--snapshot-interval",
    "--max-num-partial-prefills": "--chunked-prefill-size",
    "--max-long-partial-prefills": "--chunked-prefill-size",
    "--long-prefill-token-threshold": "--chunked-prefill-size",
    "--logits-processors": "--plugin FILE, with a logits processor",
    "--scheduler-cls": "--scheduling-policy NAME, of a plugin",
    "--reasoning-parser-plugin": "--response-template FILE",
    "--tool-parser-plugin": "--response-template FILE",
    "--cpu-offload-gb": "--device cuda,cpu on two ranks, or --expert-offload for the experts of a mixture",
    "--profiler-config": "--trace FILE",
    "--collect-detailed-traces": "--trace FILE",
    "--enable-layerwise-nvtx-tracing": "--trace FILE",
    "--enable-log-requests": "--log-json",
    "--log-config-file": "--log-level",
    "--uvicorn-log-level": "--log-level",
    "--shutdown-timeout": "--drain-timeout",
    "--dataset-name": "--dataset FILE",
    "--dataset-path": "--dataset FILE",
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--save-result": "--output-json FILE",
    "--result-dir": "--output-json FILE",
    "--result-filename": "--output-json FILE",
}
"""Flags of other engines with a similar meaning, each with the flag to use here."""

NEEDLESS = {
    "--trust-remote-code": "the code of a checkpoint is never run",
    "--enforce-eager": "captured steps do not change the tokens",
    "--enable-chunked-prefill": "prompts are always split into chunks, of --chunked-prefill-size tokens at most",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--tool-call-parser": REPLY_FORMAT,
    "--reasoning-parser": REPLY_FORMAT,
    "--guided-decoding-backend": "llguidance handles all structured outputs",
    "--structured-outputs-config": "llguidance handles all structured outputs",
    "--runner": EMBEDDINGS,
    "--task": EMBEDDINGS,
    "--compilation-config": CAPTURED,
    "--max-seq-len-to-capture": CAPTURED,
    "--cuda-graph-sizes": CAPTURED,
    "--cudagraph-capture-sizes": CAPTURED,
    "--max-cudagraph-capture-size": CAPTURED,
    "--optimization-level": CAPTURED,
    "-O": CAPTURED,
    "--load-format": "the format is recognized by the checkpoint's files; for random weights, tools/random_checkpoint.py writes a checkpoint",
    "--distributed-executor-backend": LAUNCHER,
    "--ray-workers-use-nsight": LAUNCHER,
    "--disable-custom-all-reduce": "all-reduce uses the transport, or memory that CPU ranks of a node share",
    "--max-parallel-loading-workers": "each rank reads its own part of the checkpoint",
    "--model-loader-extra-config": "each rank reads its own part of the checkpoint",
    "--safetensors-load-strategy": "each rank reads its own part of the checkpoint",
    "--ignore-patterns": "only the files that are needed are downloaded",
    "--download-dir": "the folder of downloads is $HF_HOME",
    "--hf-token": "the token of the hub is $HF_TOKEN",
    "--use-tqdm-on-load": "progress is shown on a terminal",
    "--model-impl": "all models are LABInfer's own",
    "--config-format": "the format is recognized by the checkpoint's files",
    "--tokenizer-mode": "the format is recognized by the tokenizer's files",
    "--convert": EMBEDDINGS,
    "--no-enable-chunked-prefill": "prompts are always split into chunks, of --chunked-prefill-size tokens at most",
    "--async-scheduling": "plans are sent ahead; --max-inflight sets the number of micro-batches",
    "--enable-dbo": "the micro-batches of pipeline stages overlap",
    "--ubatch-size": "the micro-batches of pipeline stages overlap",
    "--num-lookahead-slots": "--speculative-config reserves the KV blocks of drafts",
    "--disable-hybrid-kv-cache-manager": "layers with a sliding window have KV blocks of their own",
    "--disable-cascade-attn": "there is no cascade attention",
    "--prefix-caching-hash-algo": "the hash of the prefix cache is fixed",
    "--calculate-kv-scales": "an int8 KV cache computes its scales itself",
    "--mamba-cache-dtype": "recurrent states have the dtype that their kernels need",
    "--mamba-ssm-cache-dtype": "recurrent states have the dtype that their kernels need",
    "--disable-log-stats": "statistics are in /metrics and /cluster",
    "--disable-log-requests": REQUEST_LOG,
    "--no-enable-log-requests": REQUEST_LOG,
    "--max-log-len": REQUEST_LOG,
    "--disable-uvicorn-access-log": REQUEST_LOG,
    "--show-hidden-metrics-for-version": "no metrics are hidden",
    "--enable-server-load-tracking": "/load is always served",
    "--enable-request-id-headers": "every answer has the header x-request-id",
    "--enable-force-include-usage": "requests ask for usage with stream_options",
    "--enable-prompt-tokens-details": "usage always has prompt_tokens_details",
    "--disable-fastapi-docs": "only /openapi.json is served",
    "--stream-interval": "tokens are streamed as they arrive",
    "--response-role": "the role is always assistant",
    "--chat-template-content-format": "the text parts of a message are joined",
    "--api-server-count": "one process serves HTTP for all ranks",
    "-asc": "one process serves HTTP for all ranks",
    "--disable-frontend-multiprocessing": "one process serves HTTP for all ranks",
    "--allow-credentials": CORS,
    "--allowed-methods": CORS,
    "--allowed-headers": CORS,
    "--percentile-metrics": PERCENTILES,
    "--metric-percentiles": PERCENTILES,
    "--flash-attn": "the fastest attention is measured at the start",
    "-fa": "the fastest attention is measured at the start",
    "--mmap": "files are always mapped",
    "--no-mmap": "files are always mapped",
}
"""Flags of other engines that have no counterpart here because none is needed, each with the reason."""

UNSUPPORTED = {
    "--enable-lora": LORA,
    "--lora-modules": LORA,
    "--max-lora-rank": LORA,
    "--max-loras": LORA,
    "--enable-lora-bias": LORA,
    "--lora-dtype": LORA,
    "--max-cpu-loras": LORA,
    "--fully-sharded-loras": LORA,
    "--default-mm-loras": LORA,
    "--data-parallel-size": REPLICAS,
    "-dp": REPLICAS,
    "--data-parallel-size-local": REPLICAS,
    "--data-parallel-rank": REPLICAS,
    "--data-parallel-start-rank": REPLICAS,
    "--data-parallel-address": REPLICAS,
    "--data-parallel-rpc-port": REPLICAS,
    "--data-parallel-backend": REPLICAS,
    "--data-parallel-hybrid-lb": REPLICAS,
    "--data-parallel-external-lb": REPLICAS,
    "--prefill-context-parallel-size": CONTEXT_PARALLEL,
    "--decode-context-parallel-size": CONTEXT_PARALLEL,
    "-dcp": CONTEXT_PARALLEL,
    "--nnodes": TORCHRUN,
    "--node-rank": TORCHRUN,
    "--master-addr": TORCHRUN,
    "--master-port": TORCHRUN,
    "--headless": "every host runs the same command line; torchrun, mpirun or srun connects them",
    "--worker-cls": "workers cannot be replaced; --plugin FILE replaces policies, kernels and models",
    "--worker-extension-cls": "workers cannot be extended; --plugin FILE adds policies, kernels and models",
    "--enable-eplb": "experts stay on their ranks",
    "--eplb-config": "experts stay on their ranks",
    "--expert-placement-strategy": "experts stay on their ranks",
    "--limit-mm-per-prompt": TEXT_ONLY,
    "--mm-processor-kwargs": TEXT_ONLY,
    "--mm-processor-cache-gb": TEXT_ONLY,
    "--mm-encoder-tp-mode": TEXT_ONLY,
    "--media-io-kwargs": TEXT_ONLY,
    "--allowed-local-media-path": TEXT_ONLY,
    "--allowed-media-domains": TEXT_ONLY,
    "--skip-mm-profiling": TEXT_ONLY,
    "--enable-mm-embeds": TEXT_ONLY,
    "--enable-prompt-embeds": "prompts are text or token ids",
    "--skip-tokenizer-init": "a model needs its tokenizer; prompts may be token ids all the same",
    "--revision": HUB_REVISION,
    "--code-revision": HUB_REVISION,
    "--tokenizer-revision": HUB_REVISION,
    "--hf-overrides": CONFIG_FILE,
    "--hf-config-path": CONFIG_FILE,
    "--rope-scaling": CONFIG_FILE,
    "--rope-theta": CONFIG_FILE,
    "--disable-sliding-window": "the windows of the checkpoint are kept; --sliding-window N makes them shorter",
    "--generation-config": "the checkpoint's generation_config.json is used; change it in a copy of the directory",
    "--override-generation-config": "requests give other sampling fields, or change generation_config.json in a copy of the directory",
    "--pooler-config": 'the checkpoint\'s files name the pooling; requests may give "pooling" and "normalize"',
    "--override-pooler-config": 'the checkpoint\'s files name the pooling; requests may give "pooling" and "normalize"',
    "--max-logprobs": "a request gets at most 20",
    "--logprobs-mode": "logprobs are always those before any logits processor",
    "--enable-sleep-mode": "memory is kept until the end; stop the server to free it",
    "--kv-transfer-config": KV_TRANSFER,
    "--kv-events-config": KV_TRANSFER,
    "--ec-transfer-config": KV_TRANSFER,
    "--kv-offloading-size": "cached prefixes stay on the device; --swap-space holds preempted sequences only",
    "--kv-offloading-backend": "cached prefixes stay on the device; --swap-space holds preempted sequences only",
    "--config": "options are flags; keep them in a shell script",
    "--additional-config": "every option is a flag of its own",
    "--uds": "the server listens on TCP; give --host and --port",
    "--root-path": "the API begins at /; let the reverse proxy remove the prefix",
    "--middleware": "put a reverse proxy in front",
    "--ssl-ca-certs": CLIENT_CERTIFICATES,
    "--ssl-cert-reqs": CLIENT_CERTIFICATES,
    "--enable-ssl-refresh": "certificates are read at the start; restart the server after a renewal",
    "--trust-request-chat-template": "requests cannot bring a template; --chat-template FILE is the server's",
    "--default-chat-template-kwargs": 'each request gives its chat_template_kwargs, such as {"enable_thinking": false}',
    "--return-tokens-as-token-ids": "answers have the text of their tokens",
    "--tool-server": "clients run the tools",
    "--enable-log-outputs": REQUEST_LOG,
    "--enable-log-deltas": REQUEST_LOG,
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is not served",
    "--backend": OWN_LOAD,
    "--endpoint": OWN_LOAD,
    "--base-url": OWN_LOAD,
}
"""Flags of vLLM for what LABInfer does not do, each with the reason and what to do instead."""

NEAR = 0.8
"""Minimum similarity (``difflib``) at which an unknown word counts as a misspelled option or command. It is high
because the names of all benchmarks share their first word."""
SHORTEST = 3
"""Minimum letters of an abbreviated flag. A word of at most this length is never taken for a typo: too many options are
similar."""


def suggest(flag: str, known: Collection[str]) -> str:
    """Hint for an unknown flag, to append to ``unknown option FLAG``: which flag to use, why none is needed, or what is
    not supported; may be empty.

    Args:
        known: flags of the command.
    """
    if reason := NEEDLESS.get(flag):
        return f"; leave it out: {reason}"
    if reason := UNSUPPORTED.get(flag):
        return f": {reason}"
    near = REPLACEMENTS.get(flag, "")
    if near.partition(" ")[0] not in known:
        near = _nearest(flag, known)
    return f" (did you mean {near}?)" if near else ""


def _nearest(flag: str, known: Collection[str]) -> str:
    """The flag that ``flag`` abbreviates or misspells; empty if there is none, or if there are several."""
    names = {name.lstrip("-"): name for name in known}  # common dashes would make all names similar
    word = flag.lstrip("-")
    candidates = sorted((name for name in names if name.startswith(word)), key=len)  # that ``word`` may abbreviate
    if len(word) < SHORTEST or not all(name.startswith(candidates[0]) for name in candidates):
        candidates = []
    if not candidates and len(word) > SHORTEST:
        candidates = difflib.get_close_matches(word, names, 1, NEAR)
    return names[candidates[0]] if candidates else ""


def read_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Rename aliases among the keyword arguments of ``LLM`` to the options that they stand for, for
    ``EngineOptions.from_flat``.

    Raises:
        UserError: a keyword is not an option but resembles one; or an option is given under two names.
    """
    names = sorted(f.name for section in SECTIONS for f in dataclasses.fields(section))
    values: dict[str, Any] = {}
    for key, value in keywords.items():
        name = SAME_OPTIONS.get(key, key)
        if name in values:
            raise UserError(f"{key} is {name}, which is given too; leave one of them out")
        if name in SamplingParams.__struct_fields__:
            raise UserError(f"{key!r} is no option of the engine; give it to SamplingParams")
        if name not in names and (hint := suggest(flag_name(name), [flag_name(known) for known in names])):
            raise UserError(as_keywords(f"unknown option {key!r}{hint}"))
        values[name] = value
    return values


def as_keywords(message: str) -> str:
    """Rewrite the flags in a message as the keyword arguments of ``LLM``: ``--max-num-seqs 0`` becomes ``max_num_seqs 0``."""
    fields = [f for section in SECTIONS for f in dataclasses.fields(section)]
    names = {flag_name(f.name): f.name for f in fields} | {"--plugin": "plugins"}
    names |= {f.metadata["other_name"]: f.name for f in fields if f.metadata["other_name"]}
    return re.sub(r"(?<![\w-])--?[a-z]+(?:-[a-z]+)*", lambda match: names.get(match[0], match[0]), message)
