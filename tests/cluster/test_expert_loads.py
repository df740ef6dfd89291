"""A served model with experts: how often each was chosen, and what was read of those in a file, at /v1/cluster and /metrics."""

from __future__ import annotations

from golden import golden
from serving import serving, wait_for


def test_loads_of_experts_are_told_while_a_model_is_served():
    offloaded = ("--quantization", "int8", "--expert-offload", "0.0001")
    with serving(
        "--model", golden("glm4-moe").directory, "--num-kv-blocks", "64", "--no-enable-prefix-caching", *offloaded
    ) as server:

        def loads() -> list[dict]:
            return server.get("/v1/cluster")[1]["experts"]

        body = {"prompt": [7] * 40, "max_tokens": 9, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
        wait_for(lambda: any(sum(item["tokens"]) for item in loads()), 10)
        found = loads()
        assert [item["layer"] for item in found] == [1, 2, 3], "the first is dense"
        assert [sum(item["tokens"]) for item in found] == [3 * 48, 3 * 48, 3 * 9], (
            "the last layer has sampled rows only"
        )
        assert all(len(item["tokens"]) == 7 for item in found)
        busiest = max(range(7), key=found[1]["tokens"].__getitem__)
        told = server.metric("labinfer:expert_tokens_total", layer="2", expert=str(busiest))
        assert told == max(found[1]["tokens"]) > 0

        def misses_are_told() -> bool:
            (reads,) = server.get("/v1/cluster")[1]["expert_reads"]
            counted = server.metric("labinfer:expert_misses_total", rank="0")
            return reads["rank"] == 0 and reads["misses"] == counted > 0 and reads["bytes_read"] > 0

        wait_for(misses_are_told, 10)
