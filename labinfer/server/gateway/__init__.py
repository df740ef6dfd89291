"""The HTTP process: OpenAI's API and the web pages, served on behalf of an engine host (part of rank 0's process). It does not
import torch."""
