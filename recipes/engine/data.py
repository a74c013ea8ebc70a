"""Image sets as NumPy arrays, and their batches."""

import dataclasses
import functools
import pathlib
from typing import NamedTuple

import keras
import numpy as np

from recipes.engine import imagenet
from recipes.engine.errors import UserError, check_size

TFDS = ("cifar10", "cifar100", "mnist")
STREAMED = (imagenet.NAME,)  # too large to be arrays
PAD = 4  # pixels on each side before the random crop
TEST_BATCH_SIZE = 500


class ImageData(NamedTuple):
    """Images, float32 `(n, height, width, channels)`, and labels, int32 `(n,)`."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int


def stem(dataset):
    """The name of a data set; for an .npz file, the name of the file."""
    return pathlib.Path(dataset).stem


def check(dataset, streamed=False):
    """Raises a UserError unless a data set is known, or the path of an .npz file.

    `streamed` says whether data sets too large to be arrays are allowed.
    """
    known = ("digits", *TFDS, *(STREAMED if streamed else ()))
    if dataset not in known and not dataset.endswith(".npz"):
        no = "" if streamed else f" ({', '.join(STREAMED)} cannot be arrays, used here)"
        raise UserError(
            f"Argument `dataset` must be one of {', '.join(known)}, or the path of an "
            f".npz file{no}. Received: dataset={dataset!r}"
        )


def augmented(dataset):
    """Whether training images are cropped and flipped: photographs are."""
    return stem(dataset).startswith(("cifar", *STREAMED))


def source(settings):
    """What a `recipes.engine.classifier.Training` trains on and tests with.

    `Arrays`, or an `imagenet.Stream`, which has the same attributes and methods.
    """
    if settings.dataset in STREAMED:
        return imagenet.Stream(settings)
    return Arrays(images(settings), settings)


def other_batches(settings, count):
    """Yields `count` batches like those of training, but of other images.

    Each is the first of an epoch, which makes them independent.
    """
    others = source(dataclasses.replace(settings, seed=1_000_000, epochs=count))
    for epoch in range(count):
        x, y = next(iter(others.batches(epoch)))
        yield np.asarray(x), np.asarray(y)


def images(settings):
    """The `ImageData` that a `recipes.engine.settings.Images` describes."""
    return load(
        settings.dataset,
        settings.data_dir,
        settings.train_size,
        settings.download,
        getattr(settings, "validation_size", None),
    )


def enlarged(images):
    """Images of 16x16 or less made 32x32 or larger, by repeating each pixel.

    VGG-16 halves its map five times. 8x8 digits are a single position by the fourth
    stage, where eight of nine weights of a kernel see only zeros; without a norm, that
    network does not train.
    """
    height = images.x_train.shape[1]
    times = -(-32 // height) if height <= 16 else 1
    pair = images.x_train, images.x_test
    x_train, x_test = (x.repeat(times, axis=1).repeat(times, axis=2) for x in pair)
    return images._replace(x_train=x_train, x_test=x_test)


@functools.lru_cache(maxsize=1)  # the next run in this process reads the same images
def load(dataset, data_dir=None, train_size=None, download=False, validation_size=None):
    """The `ImageData` of a data set, each channel standardised over training images.

    Args:
        dataset: `"digits"` (scikit-learn's 1,797 images of 8x8, the same 360 of them
            for testing every time), `"mnist"`, `"cifar10"`, `"cifar100"` (through
            tensorflow_datasets), or the path of an .npz file with the arrays
            x_train, y_train, x_test and y_test, which are permuted.
        data_dir: Where tensorflow_datasets looks. None: its own default.
        train_size: Use only this many training images, the first ones of a fixed
            permutation. None: all.
        download: Whether tensorflow_datasets may download what it does not find.
        validation_size: Hold out this many of these training images and use them
            instead of the test images, which stay unseen: for choosing settings.
    """
    check(dataset)
    if dataset == "digits":
        arrays = _digits()
    elif dataset in TFDS:
        arrays = _tfds(dataset, data_dir, download)
    else:
        arrays = _npz(dataset)
    x_train, x_test = (np.asarray(arrays[i], "float32") for i in (0, 2))
    x_train, x_test = (x[..., None] if x.ndim == 3 else x for x in (x_train, x_test))
    y_train, y_test = (np.asarray(arrays[i], "int32").reshape(-1) for i in (1, 3))
    num_classes = int(y_train.max()) + 1
    if train_size is not None:
        about = f"the training images of {dataset}"
        check_size("train_size", train_size, len(x_train), about)
    # A file may be sorted by class, and some recipes measure the first images.
    if train_size is not None or dataset.endswith(".npz"):
        chosen = np.random.default_rng(0).permutation(len(x_train))[:train_size]
        x_train, y_train = x_train[chosen], y_train[chosen]
    if validation_size is not None:
        most, about = len(x_train) - 1, "less than the training images"
        check_size("validation_size", validation_size, most, about)
        order = np.random.default_rng(1).permutation(len(x_train))
        held_out, chosen = order[:validation_size], order[validation_size:]
        x_test, y_test = x_train[held_out], y_train[held_out]
        x_train, y_train = x_train[chosen], y_train[chosen]
    mean = x_train.mean((0, 1, 2), dtype="float64").astype("float32")
    deviation = x_train.std((0, 1, 2), dtype="float64").astype("float32")
    deviation = np.maximum(deviation, 1e-7)  # a constant channel becomes 0
    x_train, x_test = ((x - mean) / deviation for x in (x_train, x_test))
    return ImageData(x_train, y_train, x_test, y_test, num_classes)


def _digits():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x.reshape(-1, 8, 8), y, test_size=360, random_state=0, stratify=y
    )
    return x_train, y_train, x_test, y_test


def _tfds(dataset, data_dir, download):
    import tensorflow_datasets as tfds

    options = {"data_dir": data_dir, "download": download, "as_supervised": True}
    try:
        splits = tfds.load(dataset, split=["train", "test"], batch_size=-1, **options)
    except (AssertionError, tfds.core.DatasetNotFoundError) as error:
        if download:
            raise
        raise UserError(
            f"Argument `data_dir` must be a tensorflow_datasets directory with the "
            f"data set {dataset}. Received: data_dir={data_dir!r}. Give the directory "
            f"that holds {dataset}/, or add --download, or give an .npz file with the "
            "arrays x_train, y_train, x_test and y_test: --dataset=path/to/"
            f"{dataset}.npz"
        ) from error
    train, test = tfds.as_numpy(splits)
    return *train, *test


def _npz(path):
    names = ImageData._fields[:4]
    if not pathlib.Path(path).is_file():
        raise UserError(
            f"Argument `dataset` must be the path of an existing .npz file. "
            f"Received: dataset={path!r}"
        )
    try:
        with np.load(path) as file:
            found = {name: file[name] for name in names if name in file}
    except Exception as error:  # zipfile and NumPy raise many kinds
        raise UserError(
            "Argument `dataset` must be the path of an undamaged .npz file. "
            f"Received: dataset={path!r}, which cannot be read ({error})"
        ) from None
    if missing := [name for name in names if name not in found]:
        raise UserError(
            f"Argument `dataset` must be an .npz file with the arrays "
            f"{', '.join(names)}. Received: dataset={path!r}, which lacks {missing}"
        )
    x, y, x_test, y_test = found.values()
    pairs = (x, y), (x_test, y_test)
    fit = all(a.ndim in (3, 4) and b.size == len(a) > 0 for a, b in pairs)
    if not fit or x.shape[1:] != x_test.shape[1:]:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in found.items())
        raise UserError(
            "Argument `dataset` must be an .npz file with images of one size, (n, "
            "height, width) or (n, height, width, channels), and a label for each, (n,)"
            f" or (n, 1). Received: dataset={path!r}, with {shapes}"
        )
    are_numbers = all(
        array.dtype.kind in "biuf" and np.isfinite(array).all()
        for array in found.values()
    )
    if not are_numbers or any((labels % 1 != 0).any() for labels in (y, y_test)):
        kinds = ", ".join(f"{name} {array.dtype}" for name, array in found.items())
        raise UserError(
            "Argument `dataset` must be an .npz file of finite numbers, with integers "
            f"as labels. Received: dataset={path!r}, with {kinds}"
        )
    if min(y.min(), y_test.min()) < 0 or y_test.max() > y.max():
        raise UserError(
            "Argument `dataset` must be an .npz file with labels from 0 on, and no "
            "test label above those of training images. "
            f"Received: dataset={path!r}, with labels "
            f"from {y.min()} to {y.max()}, of test images {y_test.min()} to "
            f"{y_test.max()}"
        )
    # Permuted for the same reason as training images in `load`.
    order = np.random.default_rng(0).permutation(len(x_test))
    return x, y, x_test[order], y_test[order]


class Arrays:
    """An `ImageData`, `images`, as the training of a classifier reads it.

    The attributes are those of `imagenet.Stream`; `test` are images and labels.
    """

    def __init__(self, images, settings):
        x, y, x_test, y_test, self.num_classes = images
        self.images, self.test, self.image_shape = images, (x_test, y_test), x.shape[1:]
        order = settings.batch_size, settings.seed, settings.augment
        self._batches = Batches(x, y, *order, replacement=settings.replacement)
        self.steps = self._batches.steps

    def batches(self, first_epoch=0):
        """Endless training batches, starting at an epoch."""
        self._batches.first_epoch = first_epoch
        return self._batches


class Batches(keras.utils.PyDataset):
    """Endless batches of training images, each a function of (seed, its number).

    Batch i belongs to epoch `first_epoch + i // steps`. An epoch is one permutation
    of the images, without the remainder that does not fill a batch; with `replacement`,
    each image is drawn from all of them. No batch depends on earlier requests, so
    neither prefetching nor a restart changes any: pass the same `steps` to `fit` as
    `steps_per_epoch`, and `first_epoch` to resume.

    Args:
        x, y: Images `(n, height, width, channels)` and labels `(n,)`.
        batch_size: Integer, at most n.
        seed: Integer, for the order and the augmentation.
        augment: Whether to pad by 4 pixels, crop at random, and mirror half the images.
        first_epoch: Integer, the epoch of batch 0.
        replacement: Whether an epoch may hold an image several times.
    """

    num_batches = None  # endless: `steps_per_epoch` says where `fit` ends an epoch

    def __init__(
        self, x, y, batch_size, seed, augment=False, first_epoch=0, replacement=False
    ):
        super().__init__()
        about = "the number of training images"
        check_size("batch_size", batch_size, len(x), about)
        self.x, self.y, self.batch_size = x, y, batch_size
        self.seed, self.augment, self.first_epoch = seed, augment, first_epoch
        self.steps, self.replacement = len(x) // batch_size, replacement

    def __getitem__(self, i):
        epoch, step = self.first_epoch + i // self.steps, i % self.steps
        rng, count = np.random.default_rng((self.seed, epoch)), len(self.x)
        order = rng.permutation(count)
        if self.replacement:
            order = rng.integers(count, size=count)
        chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
        x, y = self.x[chosen], self.y[chosen]
        if self.augment:
            x = crop_and_flip(x, np.random.default_rng((self.seed, epoch, step)))
        return x, y


def crop_and_flip(x, rng):
    """Shifts each image by up to 4 pixels, filling with zeros, and mirrors half.

    `x` are images `(n, height, width, channels)`, `rng` a `numpy.random.Generator`.
    """
    n, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))
    rows = rng.integers(0, 2 * PAD + 1, (n, 1)) + np.arange(height)
    columns = rng.integers(0, 2 * PAD + 1, (n, 1)) + np.arange(width)
    columns = np.where(rng.random((n, 1)) < 0.5, columns[:, ::-1], columns)
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
