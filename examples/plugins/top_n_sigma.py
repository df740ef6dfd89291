"""Keep the tokens whose logits are within n standard deviations of the largest (Tang et al. 2024, arXiv:2411.07641).

    python launch.py --plugin examples/plugins/top_n_sigma.py --temperature 1.5 --top-n-sigma 1 --prompt "Tell me a story."

A higher temperature then makes answers more varied without unlikely tokens. Requests can set the value: a
job line with {"prompt": "…", "top_n_sigma": 1}, a client of ``serve`` with ``extra_body={"top_n_sigma": 1}``, and Python with
``SamplingParams(top_n_sigma=1.0)``.

A processor sees one row of logits (float32, before the temperature) on the last stage. It changes the row in place, and forbids a
token with -inf.
"""

from labinfer import SamplingParameter, register

FORBIDDEN = float("-inf")


@register(
    "logits_processor",
    "top_n_sigma",
    parameter=SamplingParameter(
        default=0.0,
        least=0.0,
        most=100.0,
        help="only tokens whose logit is within N standard deviations of the largest; 0 for all",
    ),
)
def top_n_sigma(logits_V, n, row):
    allowed_N = logits_V[logits_V > FORBIDDEN]  # by the request's other constraints
    if len(allowed_N):
        logits_V[logits_V < allowed_N.max() - n * allowed_N.std(correction=0)] = FORBIDDEN
