"""An agent of OpenAI's Agents SDK that uses a LABInfer server, with one tool.

    pip install openai-agents
    python launch.py serve --model DIR
    python examples/agents_sdk.py http://127.0.0.1:8000/v1 NAME

NAME is the model's name in ``/v1/models``. The bundled demo model runs, but is too small to choose tools well.
"""

from __future__ import annotations

import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "demo") -> None:
    set_tracing_disabled(True)  # traces would go to OpenAI
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    agent = Agent(
        name="Calculator",
        instructions="Answer briefly.",
        tools=[add],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=64),
    )
    print(Runner.run_sync(agent, "17 + 25 = ?").final_output)


if __name__ == "__main__":
    main(*sys.argv[1:])
