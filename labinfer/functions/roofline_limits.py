"""``RooflineLimits``: roofline limits of a rank's memory and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RooflineLimits:
    """Rates per second of all threads of a rank together; 0 for instructions that the processor does not have."""

    threads: int
    memory: float
    """Bytes read per second."""
    float32: float
    """Float32 operations (multiplications and additions) per second."""
    dot: float
    """Operations (multiplications and additions) per second in bfloat16 dot products."""
    int8: float
    """Operations (multiplications and additions) per second in int8 dot products."""

    def arithmetic(self, quantization: str) -> float:
        """Highest rate of products with weights in ``quantization``, in operations per second."""
        wide = max(self.float32, self.dot)
        return wide if quantization == "none" else max(wide, self.int8)

    def arithmetic_rates(self) -> dict[str, float]:
        """Name and rate of each kind of arithmetic that the processor supports."""
        rates = {"float32": self.float32, "bfloat16": self.dot, "8 bits": self.int8}
        return {name: rate for name, rate in rates.items() if rate}
