"""``Ceilings``: the most that a rank's memory and arithmetic allow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ceilings:
    """Rates per second of all of a rank's threads together; 0 for an instruction that the processor does not have."""

    threads: int
    memory: float
    """Bytes read."""
    float32: float
    """Multiplications and additions."""
    dot: float
    """Multiplications and additions in products of bfloat16."""
    int8: float
    """Multiplications and additions in products of 8 bits."""

    def arithmetic(self, quantization: str) -> float:
        """The most that products with weights in this quantization can reach."""
        wide = max(self.float32, self.dot)
        return wide if quantization == "none" else max(wide, self.int8)

    def arithmetic_rates(self) -> dict[str, float]:
        """Name and rate of each kind of arithmetic that there is."""
        rates = {"float32": self.float32, "bfloat16": self.dot, "8 bits": self.int8}
        return {name: rate for name, rate in rates.items() if rate}
