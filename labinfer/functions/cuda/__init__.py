"""CUDA functions: Triton kernels for NVIDIA GPUs, and for GPUs that torch addresses as ``cuda`` (ROCm)."""
