"""Compiled routing of tokens to experts, for activations of any float dtype."""

from __future__ import annotations

import ctypes

import torch

from labinfer.functions.cpu.library import Library, readable
from labinfer.functions.routing_rule import RouterWeights, RoutingRule


class CompiledRule(ctypes.Structure):
    """C++ struct of route.cpp for a ``RoutingRule``, declared for ctypes."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("experts", "chosen", "groups", "chosen_groups", "group_best")),
        *((name, ctypes.c_int32) for name in ("scores", "is_normalized")),
        *((name, ctypes.c_float) for name in ("least_sum", "scale")),
    ]

    @classmethod
    def convert(cls, rule: RoutingRule, num_experts: int) -> CompiledRule:
        groups = rule.num_groups, rule.num_chosen_groups, rule.num_group_best
        scores = ("softmax", "sigmoid", "chosen").index(rule.scores)
        return cls(num_experts, rule.num_chosen, *groups, scores, rule.normalized, rule.least_sum, rule.scale)


class CpuRouting:
    """Implementation of ``route``; ``family_protocols`` documents the arguments.

    Args:
        library: see ``library.load``.
    """

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, library: Library):
        self._library = library

    def route(
        self, x_TD: torch.Tensor, router: RouterWeights, num_tokens_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD, tokens, rule = readable(x_TD.contiguous()), x_TD.shape[0], router.rule
        weight_ED, bias_E, scale_E = router.weight_ED, router.bias_E, router.scale_E
        ids_TA = torch.empty(tokens, rule.num_chosen, dtype=torch.int64)
        weights_TA = torch.empty(tokens, rule.num_chosen, dtype=torch.float32)
        self._library.route(
            ctypes.byref(CompiledRule.convert(rule, weight_ED.shape[0])),
            x_TD.data_ptr(),
            weight_ED.data_ptr(),
            None if bias_E is None else bias_E.data_ptr(),
            None if scale_E is None else scale_E.data_ptr(),
            ids_TA.data_ptr(),
            weights_TA.data_ptr(),
            None if num_tokens_E is None else num_tokens_E.data_ptr(),
            *x_TD.shape,
            x_TD.dtype == torch.float32,
            weight_ED.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return ids_TA, weights_TA
