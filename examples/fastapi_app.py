"""A FastAPI service around AsyncLLM: concurrent streamed requests, each aborted when its client disconnects.

    pip install fastapi uvicorn
    uvicorn --app-dir examples fastapi_app:app
    curl -N "http://127.0.0.1:8000/ask?question=17+%2B+25+%3D+%3F"

For OpenAI's API, start ``launch.py serve`` instead.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from labinfer import AsyncLLM, SamplingParams

MODEL = "demo"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with AsyncLLM(MODEL) as app.state.llm:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(question: str, max_tokens: int = 64) -> StreamingResponse:
    async def answer() -> AsyncIterator[str]:
        messages = [{"role": "user", "content": question}]
        async for delta in app.state.llm.stream(messages, SamplingParams(max_tokens=max_tokens)):
            yield delta.text

    return StreamingResponse(answer(), media_type="text/plain; charset=utf-8")
