"""A plugin of torch that does not load."""

from __future__ import annotations

import pytest

from labinfer.comm.spmd.backend_plugin import explain_backend_plugin


def test_plugin_and_cause_are_one_line():
    def import_torch() -> None:
        try:
            raise ImportError("libhccl.so: cannot open shared object file:\nNo such file or directory")
        except ImportError as error:
            raise RuntimeError(
                "Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0."
            ) from error

    with pytest.raises(RuntimeError) as caught:
        import_torch()
    text = explain_backend_plugin(caught.value)
    assert text.startswith(
        "torch's plugin torch_npu does not load: libhccl.so: cannot open shared object file: No such file or directory; "
    )
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text and "\n" not in text


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error"), ImportError("no module named torch")])
def test_other_errors_are_not_explained(error):
    assert explain_backend_plugin(error) == ""
