"""What axe-core finds on a page."""

from __future__ import annotations

from pathlib import Path

AXE = Path(__file__).parent / "axe" / "axe.min.js"
RUN_AXE = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations
    .filter(({ impact }) => impact === "serious" || impact === "critical")
    .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html + " " + node.failureSummary).join("; ")}`)"""


def findings(page) -> list[str]:
    """What axe-core has against the page as it is now. It is put in by the test, past the page's policy."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    return page.evaluate(RUN_AXE)
