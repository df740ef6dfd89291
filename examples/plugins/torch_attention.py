"""Attention of decode steps for CPUs in plain PyTorch: all sequences of a batch in two padded products.

    python launch.py --plugin examples/plugins/torch_attention.py --functions paged_attention=padded --prompt "17 + 25 = ?"

Without ``--functions`` a 16-bit model takes the implementation that is measured to be fastest at the start, and logs the choice;
``launch.py bench functions`` shows the times. Before a run uses the function, it is compared with the reference on various batches, whose
caches hold NaN where no token was written: remove the last ``masked_fill_`` to see it dropped.
"""

import itertools

import torch

from labinfer import register
from labinfer.functions.provider import Provider
from labinfer.functions.reference.attention import paged_attention as reference
from labinfer.functions.registry import Implementation


def paged_attention(q_THP, cache, batch, heads):
    """``functions.protocols.PagedAttention``; what it does not take is left to the reference."""
    num_sequences, groups = len(batch.context_lens), heads.head_ptr.diff().tolist()
    if len(q_THP) > num_sequences or len({*groups}) > 1 or heads.window or heads.sinks_H is not None:
        return reference(q_THP, cache, batch, heads)
    tables = batch.tables_N.split([end - begin for begin, end in itertools.pairwise(batch.table_ptr)])
    tables_BN = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)  # block 0 stands where a table has ended
    k_BKSP, v_BKSP = (
        pool.load(tables_BN.flatten(), q_THP.dtype).unflatten(0, (num_sequences, -1)).transpose(1, 2)
        for pool in (cache.keys, cache.values)
    )
    unseen_B11S = torch.arange(k_BKSP.shape[2]) >= batch.context_lens_B[:, None, None, None]
    q_BKGP = q_THP.unflatten(1, (len(groups), -1))  # G query heads read a KV head
    scores_BKGS = (q_BKGP @ k_BKSP.mT * heads.scale).masked_fill_(unseen_B11S, -torch.inf)
    # Weights of zero are not enough where no token was written: 0 times NaN is NaN.
    v_BKSP.masked_fill_(unseen_B11S.mT, 0)
    return (scores_BKGS.float().softmax(-1).to(q_THP.dtype) @ v_BKSP).flatten(1, 2)


@register("function_provider", "torch_attention")
class TorchAttention(Provider):
    """A provider may also compile (``prepare``) and say which library it uses (``fingerprint``)."""

    def register(self, registry, group_size):
        registry.add("paged_attention", Implementation(name="padded", call=paged_attention, devices=("cpu",)))
