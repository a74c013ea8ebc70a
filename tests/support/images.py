"""Image sets in the files of tensorflow_datasets, and which crops images are."""

import numpy as np


def write_tfds(root, name, splits, per_shard=1000):
    """Writes a data set; `splits` is a dict from a split to its examples, dicts."""
    import tensorflow_datasets as tfds

    info = tfds.builder(name, data_dir=str(root)).info
    (root / name / str(info.version)).mkdir(parents=True)
    writer = tfds.core.SequentialWriter(info, per_shard)
    writer.initialize_splits(splits)
    writer.add_examples(splits)
    writer.close_all()


def assert_every_crop_and_flip(crop_and_flip):
    """Each image is one of its crops, padded by 4, and all kinds of crops are there."""
    x = np.random.default_rng(0).normal(size=(200, 6, 5, 2)).astype("float32")
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    found = []
    for image, source in zip(np.asarray(crop_and_flip(x)), padded, strict=True):
        crops = (
            (top, left, step)
            for top, left, step in np.ndindex(9, 9, 2)
            if np.array_equal(
                source[top : top + 6, left : left + 5][:, :: 1 - 2 * step], image
            )
        )
        found.append(next(crops))
    assert [set(each) for each in np.transpose(found)] == [{*range(9)}] * 2 + [{0, 1}]
