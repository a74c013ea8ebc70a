"""ImageNet (ILSVRC2012) as batches that are read while a network trains.

tensorflow_datasets reads it, and TensorFlow decodes, crops and mirrors, on the host and
for every backend. The images cannot be downloaded without an account: put the archives
ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar of https://image-net.org into
`<data_dir>/downloads/manual` and pass `--download` once, which prepares them.

Training images are a random part of 8 to 100 % of the area with a ratio of width to
height between 3/4 and 4/3, resized, and half of them mirrored. Test images are the
middle 7/8 of the shorter side, as in the paper and in PyTorch's example.

The order of files and images, and each crop and mirroring, depend only on the seed, not
on the number of threads. They can differ with other versions of TensorFlow or
tensorflow_datasets, or with another number of shards.
"""

import functools

import keras
import numpy as np

from recipes.engine.errors import UserError, check_size

NAME = "imagenet2012"
# The paper's settings (Section 6.1) that differ from those for CIFAR.
SETTINGS = {"batch_size": 256, "weight_decay": 1e-4, "image_size": 224}
DROPS = (1 / 4, 1 / 2, 3 / 4)  # of the rate: epochs 30, 60 and 90 of its 120
MEAN = 255 * np.array([0.485, 0.456, 0.406], "float32")
DEVIATION = 255 * np.array([0.229, 0.224, 0.225], "float32")
AUTOTUNE = -1  # of tf.data
SHUFFLED = 10_000  # encoded images, of about 0.1 MB, from which the next is chosen


class Stream:
    """The batches of ImageNet, as a classifier reads them.

    Args:
        settings: A `recipes.engine.classifier.Training`. With `download`, a missing
            data set is prepared from its archives.

    Attributes:
        image_shape: `(image_size, image_size, 3)`.
        steps: Number of training batches in an epoch.
        test: A `tf.data.Dataset` of all test batches.
        test_count: Number of test images.
    """

    def __init__(self, settings):
        self._settings = settings
        self._builder = _builder(settings.data_dir, settings.download)
        info, about = self._builder.info, f"the training images of {NAME}"
        self._split, self._count = "train", info.splits["train"].num_examples
        if (size := settings.train_size) is not None:
            check_size("train_size", size, self._count, about)
            self._split, self._count = f"train[:{size}]", size
        check_size("batch_size", settings.batch_size, self._count, about)
        self.steps = self._count // settings.batch_size
        self.image_shape = (settings.image_size, settings.image_size, 3)
        self.num_classes = info.features["label"].num_classes
        self.test_count = info.splits["validation"].num_examples
        self._part, self._parts = 0, 1
        self.test = self._test().batch(settings.batch_size).prefetch(AUTOTUNE)

    def share(self, part, parts, test_size, padded_size):
        """From now on, read only number `part` of `parts` equal parts of each batch.

        Each process reads all files and decodes its own training images. Together they
        have the batch that a single process would have, in another order. Test batches
        of `test_size` images, a divisor of `test_count`, are filled up to
        `padded_size`, and have a third entry, weights: 1 for images, 0 for the filling.
        """
        import tensorflow as tf

        self._part, self._parts = part, parts
        size = padded_size // parts

        def mine(array):
            fill = [[0, padded_size - test_size]] + [[0, 0]] * (len(array.shape) - 1)
            return tf.pad(array, fill)[part * size : (part + 1) * size]

        def filled(images, labels):
            return mine(images), mine(labels), mine(tf.ones(test_size))

        test = self._test().batch(test_size, drop_remainder=True)
        self.test = test.map(filled, AUTOTUNE).prefetch(AUTOTUNE)

    def batches(self, first_epoch=0):
        """A `tf.data.Dataset` of the training batches from `first_epoch` on.

        Each epoch has all images once, without a remainder that does not fill a batch:
        images `(batch_size, height, width, 3)`, float32, labels `(batch_size,)`, int64.
        """
        epochs = map(self._epoch, range(first_epoch, self._settings.epochs))
        batches = functools.reduce(lambda a, b: a.concatenate(b), epochs)
        return batches.prefetch(AUTOTUNE)

    def _epoch(self, epoch):
        seed = self._settings.seed
        first = epoch * self._count  # the first random number of this epoch
        order = int(np.random.default_rng((seed, epoch)).integers(2**31))
        images = self._read(self._split, shuffle_seed=order)
        images = images.shuffle(SHUFFLED, seed=order, reshuffle_each_iteration=False)

        def prepare(number, pair):
            if not self._settings.augment:
                return self._middle(*pair)
            image = random_crop(pair[0], self.image_shape[0], (seed, first + number))
            return standardise(image), pair[1]

        return (
            images.enumerate()
            .take(self.steps * self._settings.batch_size)
            .shard(self._parts, self._part)
            .map(prepare, AUTOTUNE)
            .batch(self._settings.batch_size // self._parts, drop_remainder=True)
        )

    def _middle(self, image, label):
        return standardise(middle_crop(image, self.image_shape[0])), label

    def _test(self):
        return self._read("validation").map(self._middle, AUTOTUNE)

    def _read(self, split, shuffle_seed=None):
        """Encoded images and labels, in an order given by `shuffle_seed`."""
        import tensorflow_datasets as tfds

        fixed = {"shuffle_reshuffle_each_iteration": False, "try_autocache": False}
        config = tfds.ReadConfig(shuffle_seed=shuffle_seed, **fixed)
        return self._builder.as_dataset(
            split,
            shuffle_files=shuffle_seed is not None,
            decoders={"image": tfds.decode.SkipDecoding()},
            read_config=config,
            as_supervised=True,
        )


def random_crop(image, size, seed):
    """A random part of a JPEG, resized, and mirrored half of the time.

    Args:
        image: Scalar string tensor.
        size: Integer, height and width of the result.
        seed: Two integers, which determine the result.

    Returns:
        Float32 tensor `(size, size, 3)`, from 0 to 255.
    """
    import tensorflow as tf

    seeds = tf.random.split(tf.stack([tf.cast(part, "int64") for part in seed]))
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(image),
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seeds[0],
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
    )
    part = _decode(image, tf.concat([begin[:2], extent[:2]], 0), size)
    return tf.image.stateless_random_flip_left_right(part, seeds[1])


def middle_crop(image, size):
    """The middle square, 7/8 of the shorter side, resized; see `random_crop`."""
    import tensorflow as tf

    shape = tf.io.extract_jpeg_shape(image)[:2]
    side = tf.cast(tf.round(7 / 8 * tf.cast(tf.reduce_min(shape), "float32")), "int32")
    side = tf.maximum(side, 1)
    return _decode(image, tf.concat([(shape - side) // 2, [side, side]], 0), size)


def _decode(image, crop, size):
    import tensorflow as tf

    pixels = tf.io.decode_and_crop_jpeg(image, crop, channels=3)
    resized = tf.image.resize(pixels, (size, size), antialias=True)
    return tf.ensure_shape(resized, (size, size, 3))


def standardise(image):
    """Pixels from 0 to 255, standardised by ImageNet's channel means and deviations."""
    return (image - MEAN) / DEVIATION


def _builder(data_dir, download):
    import tensorflow as tf
    import tensorflow_datasets as tfds

    if keras.backend.backend() != "tensorflow":
        tf.config.set_visible_devices([], "GPU")  # GPUs are for the other backend
    builder = tfds.builder(NAME, data_dir=data_dir)
    if download:
        builder.download_and_prepare()
    if not builder.is_prepared():
        raise UserError(
            "Argument `data_dir` must be a tensorflow_datasets directory with the data "
            f"set {NAME}. Received: data_dir={data_dir!r}. Give the directory that "
            f"holds {NAME}/, or put ILSVRC2012_img_train.tar and "
            "ILSVRC2012_img_val.tar into its downloads/manual/ and add --download"
        )
    return builder
