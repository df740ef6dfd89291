"""Two models on one server, asked at once, against each of them alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from serving import Server

from labinfer import LLM, SamplingParams

MODELS = {"a": "demo", "b": "demo-draft"}
PROMPTS = ["red blue", "17 + 25 = ?", "中文", "hello hello", "the sea"]


def check_both_at_once(server: Server) -> None:
    """``server`` has ``a=demo`` and ``b=demo-draft``, in float32."""
    everything = {"top_k": -1, "top_p": 1.0}  # the models recommend less to who asks a server
    cases = [
        (name, prompt, {"max_tokens": 30 + number, "temperature": temperature, "seed": number} | everything)
        for number, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 1.2)
        for name in MODELS
    ]

    def ask(case) -> str:
        name, prompt, fields = case
        status, answer = server.post("/v1/completions", {"model": name, "prompt": prompt} | fields)
        assert status == 200, answer
        assert answer["model"] == name
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(len(cases)) as threads:
        answers = list(threads.map(ask, cases))
    for name, model in MODELS.items():
        mine = [(case, answer) for case, answer in zip(cases, answers, strict=True) if case[0] == name]
        with LLM(model, dtype="float32") as llm:
            outputs = llm.generate(
                [prompt for (_, prompt, _), _ in mine], [SamplingParams(**fields) for (_, _, fields), _ in mine]
            )
        assert [answer for _, answer in mine] == [output.text for output in outputs]
    server.wait_idle()
