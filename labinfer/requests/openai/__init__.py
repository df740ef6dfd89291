"""OpenAI's objects: answers and errors as its API has them."""
