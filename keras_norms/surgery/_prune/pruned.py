"""What `prune` returns."""

from typing import NamedTuple

import keras
import numpy as np


class Pruned(NamedTuple):
    """What `prune` returns.

    Attributes:
        model: The smaller model.
        removed: Dictionary from the name of each convolution and Dense layer that makes
            fewer channels to the numbers of those that are gone, a sorted integer
            vector. A layer of a nested model is called `model/layer`.
        channels: How many channels the convolutions (but depthwise ones) and Dense
            layers make, before and after: two integers.
        parameters: How many weights there are, before and after.
        macs: Multiply-accumulates of convolutions and Dense layers for one sample,
            before and after; `None` where the model takes more than one size.
        error: Root of the mean square of the change of the outputs over that of the
            outputs themselves, over `data` and all outputs.
        largest: Largest change of an output, over the largest output.
    """

    model: keras.Model
    removed: dict[str, np.ndarray]
    channels: tuple[int, int]
    parameters: tuple[int, int]
    macs: tuple[int, int] | None
    error: float
    largest: float

    @property
    def share(self) -> float:
        """The share of all channels that is gone, from 0 to 1."""
        return 1 - self.channels[1] / self.channels[0]

    def __str__(self) -> str:
        lines = [
            f"{name}: {before:,} -> {after:,} ({after / before - 1:+.1%})"
            for name, (before, after) in (
                ("channels", self.channels),
                ("parameters", self.parameters),
                ("multiply-accumulates", self.macs or (0, 0)),
            )
            if before
        ]
        lines.append(
            f"outputs change by {self.error:.1e} (root mean square) and at most by "
            f"{self.largest:.1e} of the largest"
        )
        lines += [f"  {name}: {len(gone)} gone" for name, gone in self.removed.items()]
        return "\n".join(lines)
