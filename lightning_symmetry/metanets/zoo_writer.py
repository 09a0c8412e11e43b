"""Write trained networks into a zoo, chunk by chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_symmetry.metanets.zoo_append import Appender
from lightning_symmetry.metanets.zoo_factory import build, described_factory, imported
from lightning_symmetry.metanets.zoo_files import DTYPES, ZooHeader, constants_digest, library_versions
from lightning_symmetry.metanets.zoo_layout import ZooLayout, fixed_entries
from lightning_symmetry.metanets.zoo_manifest import STATUSES, plain_record


class ZooWriter:
    """Writes networks of one architecture into a folder that :class:`Zoo` reads, a chunk at a time.

    A chunk counts when :meth:`append` returns, and is then on the disk. A process that is killed at any point leaves
    the whole chunks that it had written; a writer that is opened on the same folder goes on after them, and
    :attr:`indices` says what need not be done again. One writer at a time may have a folder: parallel processes write
    shards, which :func:`merge_zoos` puts together.

    ::

        with ZooWriter("zoo", network, factory="my_package.nets:small_resnet") as writer:
            for settings in todo(without=writer.indices):
                writer.append(train(settings), [{"index": s.index, "accuracy": s.accuracy} for s in settings])

    Attributes:
        layout: How a network lies in a row.
        path: Folder of the zoo.
    """

    def __init__(
        self,
        path: str | Path,
        network: nn.Module,
        dtype: Literal["float32", "float16"] = "float32",
        factory: str | None = None,
        factory_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Open a folder for writing, which is made if it is not there.

        Args:
            path: Folder of the zoo.
            network: A network of the architecture, with the masks and constants that all networks have. Its
                weights are not written.
            dtype: Type of the stored weights. Half precision keeps 3 digits.
            factory: What builds the network, as ``"module:function"``; without one, readers name it themselves.
            factory_arguments: Keyword arguments of `factory`, which can be written as JSON.

        Raises:
            ValueError: If the folder holds networks of another architecture, other constants, type or factory; or the
                factory builds another network.
            ZooError: If the folder is being written, or holds damaged or foreign files.
        """
        if dtype not in DTYPES:
            raise ValueError(f"Expected argument `dtype` to be one of {sorted(DTYPES)}, but got {dtype!r}.")
        self.path = Path(path)
        self.layout = ZooLayout.of(network)
        described = described_factory(factory, factory_arguments)
        if described is not None:
            made = ZooLayout.of(build(imported(described["function"]), described["arguments"]))
            if found := self.layout.difference(made, "the network", f"what {factory} builds"):
                raise ValueError(f"The factory {factory} builds another network: {found}.")
        state = {name: value.detach().cpu() for name, value in network.state_dict().items()}
        self._constants = {entry.name: state[entry.name] for entry in self.layout.having("constant")}
        self._counters = [int(state[entry.name]) for entry in self.layout.having("counter")]
        fixed = fixed_entries(network, self.layout)
        self._fixed = np.flatnonzero(fixed)
        self._fixed_values = self._row(state)[self._fixed]
        header = ZooHeader(self.layout, dtype, constants_digest(self._constants, fixed), described, library_versions())
        self._files = Appender(self.path, header, self._constants, fixed)
        self._indices = {record["index"] for record in self._files.manifest.records}

    def __len__(self) -> int:
        return len(self._files.manifest)

    @property
    def indices(self) -> frozenset[int]:
        """The `index` of each network that is there."""
        return frozenset(self._indices)

    def append(
        self,
        networks: Tensor | np.ndarray | Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
        records: Sequence[Mapping[str, Any]],
    ) -> None:
        """Add k networks: all of them or, if an error is raised, none.

        Entries of weights that are constants of asymmetric layers are written as these constants, as in a
        ``state_dict``.

        Args:
            networks: One of

                - rows, shape (k, P), of parameters and floating point buffers in the order of `layout`; integer
                  buffers are then those of the writer's network;
                - tensors by name, each of shape ``(k, *shape)``, as ``torch.func.stack_module_state`` gives them;
                - k ``state_dict``.

                In the latter two, constants may be left out.
            records: What is known about each network, to be written as JSON: settings, seeds, accuracy, losses. Three
                names have a meaning. `index` numbers the network among all shards; by default it is the position.
                `status` is "ok" or "diverged"; by default, whether all weights are finite. Names that begin with
                an underscore, such as `_seconds`, are kept but take no part in the checksum. Numbers that are not
                finite are kept as None.

        Raises:
            ValueError: If shapes, names or constants do not fit, a weight of an "ok" network is not finite or beyond
                the range of half precision, an index is there already, or a record is no JSON.
            OSError: If the disk is full; the zoo is left as it was, and the same chunk can be added again.
        """
        if len(records) == 0:
            return
        rows, counters = self._stacked(networks, len(records))
        rows[:, self._fixed] = self._fixed_values
        finite = np.isfinite(rows).all(axis=1)
        with np.errstate(over="ignore"):
            stored = rows.astype(DTYPES[self._files.header.dtype])
        noted = [self._noted(record, i, bool(finite[i])) for i, record in enumerate(records)]
        lost = finite & ~np.isfinite(stored).all(axis=1)
        if found := [record["index"] for record, i in zip(noted, lost, strict=True) if i and record["status"] == "ok"]:
            raise ValueError(
                f"Networks {found[:5]} have weights beyond the range of {stored.dtype}: write the zoo with "
                "dtype='float32', or give them the status 'diverged'."
            )
        indices = Counter(record["index"] for record in noted)
        if twice := sorted(index for index, count in indices.items() if count > 1 or index in self._indices):
            raise ValueError(f"Expected each `index` once in a zoo, but {self.path} would have {twice[:5]} twice.")
        self._files.append(stored, noted, counters)
        self._indices.update(indices)

    def _noted(self, record: Mapping[str, Any], place: int, finite: bool) -> dict[str, Any]:
        noted = {"index": len(self) + place, "status": "ok" if finite else "diverged", **plain_record(record)}
        index, status = noted["index"], noted["status"]
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**63:
            raise ValueError(f"Expected `index` of a record to be an integer from 0 to 2**63 - 1, but got {index!r}.")
        if status not in STATUSES:
            raise ValueError(f"Expected `status` of a record to be one of {STATUSES}, but got {status!r}.")
        if status == "ok" and not finite:
            raise ValueError(f"Network {index} has weights that are not finite: its status is 'diverged', not 'ok'.")
        return noted

    def _stacked(self, networks: Any, count: int) -> tuple[np.ndarray, list[list[int]]]:
        """Return rows of float32, in memory of their own, and counters."""
        if isinstance(networks, Tensor | np.ndarray):
            if tuple(networks.shape) != (count, self.layout.num_features):
                raise ValueError(
                    f"Expected weights of shape {(count, self.layout.num_features)} for {count} records, but got "
                    f"{tuple(networks.shape)}."
                )
            given = networks.detach().cpu().float().numpy() if isinstance(networks, Tensor) else networks
            return np.array(given, dtype=np.float32, order="C"), [self._counters] * count
        if isinstance(networks, Mapping):
            lengths = {name: len(value) if value.ndim else None for name, value in networks.items()}
            if wrong := [name for name, length in lengths.items() if length != count]:
                raise ValueError(
                    f"Expected stacked tensors of {count} networks, as many as records, but {wrong[0]} has shape "
                    f"{tuple(networks[wrong[0]].shape)}."
                )
            networks = [{name: value[i] for name, value in networks.items()} for i in range(count)]
        if len(networks) != count:
            raise ValueError(f"Expected as many networks as records, but got {len(networks)} and {count}.")
        states = [{name: value.detach().cpu() for name, value in network.items()} for network in networks]
        for place, state in enumerate(states):
            self._check(state, place)
        counters = [[int(state[entry.name]) for entry in self.layout.having("counter")] for state in states]
        return np.stack([self._row(state) for state in states]), counters

    def _check(self, state: Mapping[str, Tensor], place: int) -> None:
        known = {entry.name: entry for entry in self.layout.entries}
        missing = [e.name for e in self.layout.entries if e.name not in state and e.role != "constant"]
        if wrong := [*missing, *(name for name in state if name not in known)]:
            side = "lacks" if wrong[0] in missing else "has"
            other = "has" if wrong[0] in missing else "lacks"
            raise ValueError(f"Network {place} of the chunk {side} {wrong[0]}, which the zoo's network {other}.")
        for name, value in state.items():
            if tuple(value.shape) != known[name].shape:
                raise ValueError(
                    f"Network {place} of the chunk has {name} of shape {tuple(value.shape)}, but the zoo's network of "
                    f"shape {known[name].shape}."
                )
            if name in self._constants and not torch.equal(value.to_dense(), self._constants[name].to_dense()):
                raise ValueError(
                    f"Network {place} of the chunk has other constants than the zoo's network: {name} differs. All "
                    "networks of a zoo are made asymmetric with the same seed."
                )

    def _row(self, state: Mapping[str, Tensor]) -> np.ndarray:
        return torch.cat([state[entry.name].flatten().float() for entry in self.layout.in_rows]).numpy()

    def close(self) -> None:
        """Let other writers in; again does nothing."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
