"""How many multiply-accumulates a graph takes for one sample."""

import numpy as np

from keras_norms.surgery._graph import linear


def macs_of(graph):
    """Multiply-accumulates of all calls, or `None` where sizes are not known."""
    total = 0
    for node in graph.nodes:
        unit = node.unit
        if unit.graph is not None:
            macs = macs_of(unit.graph)
        elif issubclass(unit.cls, linear.PLAIN) and unit.cls not in linear.EINSUM:
            macs = _macs_of_call(node)
        else:
            continue
        if macs is None:
            return None
        total += macs
    return total


def _macs_of_call(node):
    unit = node.unit
    value = node.input if unit.cls in linear.TRANSPOSED else node.output
    positions = list(value.shape[1:])
    del positions[linear.channel_axis(unit, value.rank) - 1]
    if None in positions:
        return None
    kernels = [v for v in unit.layer.weights if v.name.endswith("kernel")]
    return int(np.prod(positions)) * sum(int(np.prod(v.shape)) for v in kernels)
