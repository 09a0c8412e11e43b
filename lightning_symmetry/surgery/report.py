"""What a conversion changed, what it left alone, and why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReportRow:
    """One layer of a conversion: its name and type, and what happened to it."""

    name: str
    kind: str
    changed: bool
    detail: str


@dataclass
class ConversionReport:
    """The layers that a conversion changed and those that it left alone, each with the reason.

    Attributes:
        verb: The conversion, e.g. ``"asymmetrize"``.
        rows: One row a layer, in the network's order.
    """

    verb: str
    rows: list[ReportRow] = field(default_factory=list)

    @property
    def changed(self) -> list[str]:
        """Names of the layers that were changed."""
        return [row.name for row in self.rows if row.changed]

    @property
    def left_alone(self) -> dict[str, str]:
        """Names of the layers that were left alone, with the reasons."""
        return {row.name: row.detail for row in self.rows if not row.changed}

    def add(self, name: str, kind: str, changed: bool, detail: str) -> None:
        """Add a row."""
        self.rows.append(ReportRow(name, kind, changed, detail))

    def __str__(self) -> str:
        rows = [("layer", "type", "", "what")]
        rows += [(r.name, r.kind, "changed" if r.changed else "left alone", r.detail) for r in self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([f"{self.verb}: {len(self.changed)} of {len(self.rows)} layers changed", *lines])
