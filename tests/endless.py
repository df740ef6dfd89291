"""EndlessReference: Transformers over a context from which tokens are cut."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class EndlessReference:
    """Greedy decoding by Transformers over a cache from which tokens are cut, the keys after them rotated back."""

    def __init__(self, checkpoint, context: int, kept: int, dropped: int):
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.context, self.kept, self.dropped = context, kept, dropped
        self.cache, self.length = DynamicCache(), 0  # of all tokens, also in layers with windows

    @torch.no_grad()
    def generate(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        tokens, logprobs, ids = [], [], prompt
        for _ in range(num_tokens):
            if self.length == self.context:
                self._shift()
            positions = torch.arange(self.length, self.length + len(ids))
            out = self.model(torch.tensor([ids]), position_ids=positions[None], past_key_values=self.cache)
            self.length += len(ids)
            logprobs_V = out.logits[0, -1].log_softmax(-1)
            tokens.append(int(logprobs_V.argmax()))
            logprobs.append(float(logprobs_V.max()))
            ids = tokens[-1:]
        return tokens, logprobs

    def _shift(self) -> None:
        for number, layer in enumerate(self.cache.layers):
            angles_P = (self._inverse(number) * self.dropped).repeat(2)
            tail = layer.keys[:, :, self.kept + self.dropped :]
            low, high = tail.chunk(2, dim=-1)
            turned = tail * angles_P.cos() + torch.cat((high, -low), dim=-1) * angles_P.sin()
            layer.keys = torch.cat([layer.keys[:, :, : self.kept], turned], dim=2)
            values = layer.values
            layer.values = torch.cat([values[:, :, : self.kept], values[:, :, self.kept + self.dropped :]], dim=2)
        self.length -= self.dropped

    def _inverse(self, layer: int) -> torch.Tensor:
        """Angles for each position of a layer's pairs, from the model's own embedding; a factor on them stays in the keys."""
        rotary = self.model.model.rotary_emb
        name = "inv_freq" if hasattr(rotary, "inv_freq") else f"{self.model.config.layer_types[layer]}_inv_freq"
        return getattr(rotary, name)
