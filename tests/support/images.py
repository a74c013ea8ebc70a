"""Image sets in the files of tensorflow_datasets, and which crops images are."""

import numpy as np


def write_tfds(root, name, splits, shards=1):
    """Writes a data set; `splits` is a dict from a split to its examples, dicts."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    builder = tfds.builder(name, data_dir=str(root))
    features = builder.info.features
    directory = root / name / str(builder.version)
    directory.mkdir(parents=True)
    infos = []
    for split, examples in splits.items():
        parts = np.array_split(np.arange(len(examples)), shards)
        for shard, part in enumerate(parts):
            file = f"{name}-{split}.tfrecord-{shard:05}-of-{shards:05}"
            with tf.io.TFRecordWriter(str(directory / file)) as writer:
                for number in part:
                    example = features.encode_example(examples[number])
                    writer.write(features.serialize_example(example))
        lengths = [len(part) for part in parts]
        info = tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=0)
        infos.append(info)
    tfds.folder_dataset.write_metadata(
        data_dir=directory,
        features=features,
        split_infos=infos,
        filename_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        supervised_keys=("image", "label"),
    )


def assert_every_crop_and_flip(crop_and_flip):
    """Each image is one of its crops, padded by 4, and all kinds of crops are there."""
    x = np.random.default_rng(0).normal(size=(200, 6, 5, 2)).astype("float32")
    out = np.asarray(crop_and_flip(x))
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    found = []
    for image, source in zip(out, padded, strict=True):
        crops = {
            (top, left, step): source[top : top + 6, left : left + 5][:, ::step]
            for top in range(9)
            for left in range(9)
            for step in (1, -1)
        }
        same = (key for key, crop in crops.items() if np.array_equal(crop, image))
        found.append(next(same))
    tops, lefts, steps = np.transpose(found)
    assert set(tops) == set(lefts) == set(range(9)) and set(steps) == {1, -1}
