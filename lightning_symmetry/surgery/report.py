"""What a conversion changed, what it left alone, and why."""

from __future__ import annotations

import warnings
from collections.abc import Container
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

    def warn_left_alone(self, expected: Container[str] = (), stacklevel: int = 2) -> None:
        """Warn of the layers that were left alone, unless that is what the user expects.

        Args:
            expected: Names of layers that are not worth a warning: those that are skipped.
            stacklevel: Whose line is shown: 1 is the caller's, 2, as for a verb, that of the caller's caller.
        """
        unexpected = {name: reason for name, reason in self.left_alone.items() if name not in expected}
        if unexpected:
            listed = "; ".join(f"{name} ({reason})" for name, reason in unexpected.items())
            text = f"{self.verb} left {len(unexpected)} layer(s) alone: {listed}."
            warnings.warn(text, stacklevel=stacklevel + 1)

    def __str__(self) -> str:
        rows = [("layer", "type", "", "what")]
        rows += [(r.name, r.kind, "changed" if r.changed else "left alone", r.detail) for r in self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([f"{self.verb}: {len(self.changed)} of {len(self.rows)} layers changed", *lines])
