"""OpenAI's file and batch objects (API reference, "Files", "Batch")."""

from __future__ import annotations

from typing import Literal

import msgspec

from labinfer.requests.openai.api_object import ApiObject, Count, ListPage
from labinfer.requests.protocol import Metadata

BATCH_WINDOW = "24h"
BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
"""Endpoint of all requests of a batch."""


class FileObject(ApiObject, kw_only=True):
    """A stored file: metadata, without its content."""

    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: Count
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileForm(msgspec.Struct, forbid_unknown_fields=True):
    """Fields of the multipart form of ``POST /v1/files``."""

    purpose: Literal["batch"]
    file: str
    """Contents of the JSONL file."""


class FileList(ListPage, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class FileDeleted(ApiObject):
    """Confirmation of a deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: BatchUrl
    completion_window: Literal["24h"]
    """Accepted and ignored: a batch runs until it is done."""
    metadata: Metadata | None = None


class BatchError(ApiObject, kw_only=True):
    """One reason why a batch was refused or has failed."""

    code: str
    message: str
    param: str | None = None
    line: Count | None = None


class BatchErrors(ApiObject):
    """All errors of a batch."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(ApiObject):
    """Number of all lines of a batch, of answered lines and of failed lines."""

    total: Count = 0
    completed: Count = 0
    failed: Count = 0


class Batch(ApiObject, kw_only=True):
    """A batch of requests: its input and output files, its state and its times (seconds since 1970)."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str = BATCH_WINDOW
    status: Literal["validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"] = (
        "validating"
    )
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: Count
    in_progress_at: Count | None = None
    finalizing_at: Count | None = None
    completed_at: Count | None = None
    failed_at: Count | None = None
    cancelling_at: Count | None = None
    cancelled_at: Count | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the batch is waiting, running, finishing or being cancelled; false once it has ended."""
        return self.status in ("validating", "in_progress", "finalizing", "cancelling")


class BatchList(ListPage, kw_only=True):
    """A page of batches."""

    data: list[Batch]
