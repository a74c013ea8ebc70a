"""Image sets as files of tensorflow_datasets, and checks of random crops."""

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
    """Each image is a crop of its original, padded by 4, and all kinds occur."""
    x = np.random.default_rng(0).normal(size=(200, 6, 5, 2)).astype("float32")
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    # Axes: image, top, left, whether mirrored, channel, row, column.
    crops = np.lib.stride_tricks.sliding_window_view(padded, (6, 5), (1, 2))
    crops = np.stack([crops, crops[..., ::-1]], 3)
    found = np.moveaxis(np.asarray(crop_and_flip(x)), -1, 1)[:, None, None, None]
    image, *crop = np.nonzero((crops == found).all((-3, -2, -1)))
    np.testing.assert_array_equal(image, np.arange(200))
    assert [set(each) for each in crop] == [{*range(9)}] * 2 + [{0, 1}]
