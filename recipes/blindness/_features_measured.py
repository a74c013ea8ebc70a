"""Features of a classifier: what its last layer reads, and how well it is clustered."""

import keras
import numpy as np

from recipes.engine import files

BATCH_SIZE = 100


def split(model):
    """A classifier in two: what makes the features, and the layer that reads them.

    Args:
        model: A `keras.Model` that ends with a Dense layer, of logits.

    Returns:
        A `keras.Model` with the layers of `model`, and the last of these.
    """
    last = model.layers[-1]
    return keras.Model(model.inputs, last.input), last


def silhouette(points, labels):
    """How well points are clustered by their labels (Rousseeuw, 1987).

    For a point, a is its mean distance to those of its label, b that to those of the
    nearest other label, and the score is (b - a) / max(a, b): 1 is a cluster far from
    the others, 0 none at all, negative nearer to another label's.

    Args:
        points: Array `(samples, features)`.
        labels: Array of integers.

    Returns:
        The mean over points, or `None` where there is none: values that are not finite,
        or all the same, or a single label.
    """
    from sklearn.metrics import silhouette_score

    several = len(np.unique(labels)) > 1
    # t-SNE, too, ends with an error of the whole process where no variance is left.
    if not (several and np.isfinite(points).all() and np.var(points, axis=0).any()):
        return None
    return float(silhouette_score(points, labels))


def picture(points, seed):
    """Points in two dimensions, by t-SNE (van der Maaten and Hinton, 2008).

    Args:
        points: Array `(samples, features)`.
        seed: Integer.

    Returns:
        Array `(samples, 2)`.
    """
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    return TSNE(perplexity=perplexity, random_state=seed).fit_transform(points)


def measure(parts, x, y, path=None, seed=0):
    """Measures a trained classifier, at inference.

    Args:
        parts: What `split` returns.
        x, y: Inputs and labels.
        path: Where an .npz file with the picture goes, arrays `points` and `labels`.
            `None` makes no picture.
        seed: Integer, of the picture.

    Returns:
        Dict of the `accuracy`, the `silhouette` of the features, the share of them that
        are `constant` over the samples, and, where there is a picture, its
        `silhouette_of_picture`. What there is not is `None`.
    """
    below, last = parts
    points = below.predict(x, batch_size=BATCH_SIZE, verbose=0)
    logits = keras.ops.convert_to_numpy(last(points))
    found = {
        "accuracy": float(np.mean(logits.argmax(-1) == y)),
        "silhouette": silhouette(points, y),
        "constant": float(np.mean(np.ptp(points, axis=0) == 0)),
    }
    if path is None:
        return found
    if found["silhouette"] is None:
        return found | {"silhouette_of_picture": None}
    flat = picture(points, seed)
    files.write(path, lambda file: np.savez(file, points=flat, labels=y))
    return found | {"silhouette_of_picture": silhouette(flat, y)}
