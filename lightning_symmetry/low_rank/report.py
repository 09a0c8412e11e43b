"""What a factorisation changed: ranks, parameters, multiply-adds and errors."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_symmetry.surgery import ConversionReport


@dataclass(frozen=True)
class FactorizedLayer:
    r"""What became of one layer.

    Attributes:
        ranks: The rank and the full rank of each map; a layer has one, called ``""``, attention one a projection that
            was factorised.
        parameters: Entries of the weight before, of the factors after.
        multiply_adds: Those of the layer before and after, in the report's unit.
        error: Relative Frobenius error of the product, :math:`\|W - U V^\top\|_F / \|W\|_F`.
    """

    ranks: dict[str, tuple[int, int]]
    parameters: tuple[int, int]
    multiply_adds: tuple[float, float]
    error: float

    def describe(self, unit: str) -> str:
        """Return one line."""
        ranks = ", ".join(f"{name} rank {rank} of {full}".lstrip() for name, (rank, full) in self.ranks.items())
        parameters, multiply_adds = (" -> ".join(f"{n:,.0f}" for n in pair) for pair in self._counts())
        return f"{ranks}, {parameters} parameters, {multiply_adds} multiply-adds a {unit}, error {self.error:.3g}"

    def _counts(self) -> tuple[tuple[float, float], tuple[float, float]]:
        return self.parameters, self.multiply_adds


@dataclass
class FactorizationReport(ConversionReport):
    """The layers that were factorised, with what it costs and saves, and those that were left alone.

    Attributes:
        layers: What became of each layer that was changed, by name; of tied layers, the first has the parameters.
        parameters: All parameters of the network before and after.
        unit: What multiply-adds are counted for: ``"sample"`` where an example input was given, else ``"position"``:
            a row of the input of a linear layer, a pixel of the output of a convolution, a look-up.
    """

    layers: dict[str, FactorizedLayer] = field(default_factory=dict)
    parameters: tuple[int, int] = (0, 0)
    unit: str = "position"

    @property
    def multiply_adds(self) -> tuple[float, float] | None:
        """Multiply-adds a sample of all layers that were changed, before and after; None without an example input."""
        if self.unit != "sample":
            return None
        pairs = [layer.multiply_adds for layer in self.layers.values()]
        return sum(before for before, _ in pairs), sum(after for _, after in pairs)

    def __str__(self) -> str:
        before, after = self.parameters
        lines = [super().__str__()]
        if self.changed:
            lines.append(f"parameters of the network: {before:,} -> {after:,}")
        if self.changed and self.multiply_adds is not None:
            before, after = self.multiply_adds
            lines.append(f"multiply-adds of the layers changed: {before:,.0f} -> {after:,.0f} a sample")
        return "\n".join(lines)
