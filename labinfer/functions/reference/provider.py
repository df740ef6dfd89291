"""Reference provider of all functions: the core's, those of further layers, and those of quantized weights."""

from __future__ import annotations

from functools import partial

import torch

from labinfer.functions.reference import delta_rule, experts, latent_attention, mamba, packed12, quantized, route
from labinfer.functions.reference.plain import DENSE, PlainReferenceProvider
from labinfer.functions.registry import VOCABULARY_GROUP, VOCABULARY_INT4, FunctionRegistry
from labinfer.native.torch_instructions import torch_instructions


class ReferenceProvider(PlainReferenceProvider):
    """Plain torch. Of the further functions, only the two forms of latent attention are autotuned: they consist mostly of products."""

    def register(self, registry: FunctionRegistry, group_size: int) -> None:
        others = {
            "write_latent": latent_attention.write_latent,
            "latent_attention": latent_attention.latent_attention,
            "causal_conv": delta_rule.causal_conv,
            "delta_rule": delta_rule.delta_rule,
            "gated_norm": delta_rule.gated_norm,
            "selective_scan": mamba.selective_scan,
            "gated_group_norm": mamba.gated_group_norm,
            "route": route.route,
        }
        int8 = {
            "pack_weight": quantized.quantize_int8,
            "pack_codes": quantized.pack_codes,
            "linear": quantized.linear,
            "embedding": quantized.embedding,
        }
        int4 = int8 | {"pack_weight": partial(quantized.quantize_int4, group=group_size)}
        vocabulary = {
            "pack_weight": partial(quantized.quantize_int4, group=VOCABULARY_GROUP),
            "linear": quantized.linear,
            "embedding": quantized.embedding,
        }
        of_12_bits = {
            "pack_weight": packed12.pack_weight,
            "linear": packed12.linear,
            "embedding": packed12.embedding,
        }
        registry.add_all(
            of_12_bits,
            name="reference-packed12",
            dtypes=(torch.bfloat16,),
            weights="packed12",
            layout="reference-packed12",
            autotuned=False,
        )
        for form in (latent_attention.expanded, latent_attention.absorbed):
            registry.add_all({"latent_attention": form}, name=form.__name__)
        super().register(registry, group_size)
        registry.add_all(others, name="reference", autotuned=False)
        registry.add_all(int8, name="reference", quantization="int8", autotuned=False)
        registry.add_all(int4, name="reference", quantization="int4", autotuned=False)
        registry.add_all(vocabulary, name="reference", quantization=VOCABULARY_INT4, autotuned=False)
        for quantization, of_matrices in {"none": DENSE, "int8": int8, "int4": int4}.items():
            matrix_functions = (of_matrices.get(name) for name in ("pack_weight", "linear", "pack_codes"))
            make = partial(experts.ReferenceExperts, *matrix_functions)
            mixture = {"make_experts": make, "experts": experts.experts}
            registry.add_all(mixture, name="reference", quantization=quantization, autotuned=False)

    def fingerprint(self) -> tuple[object, ...]:
        return *super().fingerprint(), torch_instructions()
