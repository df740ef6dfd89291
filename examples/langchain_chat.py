"""LangChain with a LABInfer server: an answer, a stream, and structured output.

    pip install langchain-openai
    python launch.py serve
    python examples/langchain_chat.py

Other servers: ``python examples/langchain_chat.py http://host:8000/v1 MODEL``.
"""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """What an answer has to hold."""

    name: str
    age: int


def main(base_url: str = "http://127.0.0.1:8000/v1", model: str = "demo") -> None:
    llm = ChatOpenAI(base_url=base_url, model=model, api_key="none", temperature=0, max_tokens=64)
    print(llm.invoke("17 + 25 = ?").content)
    for chunk in llm.stream("What is the capital of France?"):
        print(chunk.content, end="", flush=True)
    print()
    person = llm.with_structured_output(Person, method="json_schema").invoke(
        'Write a JSON object with name "Anna" and age 31.'
    )
    print(f"{person.name} is {person.age}")


if __name__ == "__main__":
    main(*sys.argv[1:])
