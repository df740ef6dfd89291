"""with_score_head: the config of a classifier or reranker, by its files and by ``--reranker``.

Sources: ``GenericForSequenceClassification`` of Transformers 5; the module ``LogitScore`` of sentence-transformers 5.4; the model card
of Qwen3-Reranker.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as replace_struct

from labinfer.base.errors import UserError
from labinfer.base.pooling import PoolingConfig
from labinfer.base.score_head import ACTIVATIONS, CLASSIFICATION, REGRESSION, ScoreHead
from labinfer.models.architectures import classifiers
from labinfer.models.config import ModelConfig
from labinfer.models.config_file import ConfigFile, show_value
from labinfer.models.layers.score_head import ScoreHeadConfig
from labinfer.weights.hugging_face.end_tokens import vocabulary_id
from labinfer.weights.hugging_face.logit_score import read_activation, read_logit_score
from labinfer.weights.model_files import open_model

RERANKER_TOKENS = {"qwen3": ("no", "yes")}
"""For each value of ``--reranker`` but auto: texts of the tokens whose logits a causal language model is read by."""
MOST_LABELS = 1 << 16


def with_score_head(config: ModelConfig, directory: Path, reranker: str = "auto", tokenizer: str = "") -> ModelConfig:
    """``config`` with the score head of a classifier or reranker; unchanged for other models.

    Args:
        directory: the checkpoint.
        reranker: value of ``--reranker``.
        tokenizer: directory of the tokenizer, if it is not the checkpoint's.

    Raises:
        UserError: the head's settings are invalid or not supported, or ``reranker`` does not fit the checkpoint.
    """
    file = ConfigFile(open_model(directory))
    template = "" if reranker == "auto" else reranker
    if file.values.get("architectures", [""])[0] in classifiers():
        config = replace(config, has_head=False, notes=())  # a tied embedding is no LM head here
        file.require(config.is_causal, "a classifier with is_causal false is not supported")
        head = replace_struct(_read_classifier(file, directory), template=template)
        file.require(
            not template or len(head.labels) == 1,
            f"--reranker {template} scores pairs by one label, and this classifier has {len(head.labels)}; leave out --reranker",
        )
    elif template:
        tokens = RERANKER_TOKENS[template]
        source = Path(tokenizer) if tokenizer else directory
        ids = [vocabulary_id(text, source) for text in tokens]
        if None in ids:
            raise UserError(
                f"--reranker {template} reads the logits of the tokens {' and '.join(map(repr, tokens))}, but {source} has no "
                "tokenizer.json with both; leave out --reranker"
            )
        head = ScoreHead(token_ids=tuple(ids), template=template)
    else:
        head = read_logit_score(directory)
    if head is None:
        return config
    if head.token_ids:
        file.require(
            config.has_head, "a reranker by token logits needs an LM head, and the checkpoint has none (lm_head)"
        )
        file.require(
            max(head.token_ids) < config.vocab_size,
            f"token ids {list(head.token_ids)} are not in the vocabulary of {config.vocab_size} tokens",
        )
    score_head = ScoreHeadConfig(
        head=head,
        lm_head="model.embed_tokens" if config.tied_embeddings else "lm_head",
        vocab_size=config.vocab_size,
        logits_divisor=config.logits_divisor,
        logits_cap=config.logits_cap,
    )
    return replace(config, score_head=score_head, pooling=PoolingConfig(instead=head.offer))


def _read_classifier(file: ConfigFile, directory: Path) -> ScoreHead:
    """Labels and activation of a ``…ForSequenceClassification``.

    The activation is that of Transformers' text-classification pipeline: none for ``regression``, else a sigmoid for one label. Several
    labels without a ``problem_type`` have a softmax. For one label, an activation in sentence-transformers' files takes precedence.
    """
    labels, problem = file.get("id2label", dict, {}), file.values.get("problem_type")
    names = [labels.get(str(index)) for index in range(len(labels))]
    file.require(
        len(labels) <= MOST_LABELS and all(isinstance(name, str) for name in names),
        f'id2label should map "0", "1" … to texts, not {show_value(labels)}',
    )
    if not names:
        names = [f"LABEL_{index}" for index in range(file.size("num_labels", 2))]
    file.require(
        problem is None or problem in ACTIVATIONS,
        f"problem_type {show_value(problem)} is not supported; supported are {', '.join(ACTIVATIONS)}",
    )
    activation = ACTIVATIONS[problem or CLASSIFICATION]
    if len(names) == 1:  # the softmax of one logit is always 1
        activation = read_activation(directory, file.values) or ("none" if problem == REGRESSION else "sigmoid")
    pad = file.text_part().values.get("pad_token_id")
    return ScoreHead(
        labels=tuple(names),
        activation=activation,
        pad_token_id=pad if isinstance(pad, int) and pad >= 0 else None,
    )
