"""Images of two classes as a flow reads them, and what is between them."""

import numpy as np

from recipes.engine import data

LEVELS = {"digits": 17}  # values that a pixel can have; 256 of any other data set


class Pair:
    """The images of two classes, their pixels whole numbers from 0 to `levels - 1`.

    Args:
        dataset: See `recipes.engine.data.load`. The lowest and the highest value of its
            training images are taken for black and for white.
        classes: Two different labels, such as `"0+1"`.
        size: Height and width, to which blocks of pixels are averaged (and rounded).
        train_size: Use this many training images only, the first ones of a fixed
            permutation. All where None.
        data_dir, download: See `recipes.engine.data.load`.

    Attributes:
        levels: Integer.
        image_shape: `(size, size, channels)`.
        x_train, y_train, x_test, y_test: Float32 arrays; y is 0 for the first of
            `classes` and 1 for the second.
    """

    def __init__(
        self, dataset, classes, size, train_size=None, data_dir=None, download=False
    ):
        images = data.load(dataset, data_dir, None, download)
        known = {str(label): label for label in np.unique(images.y_train)}
        names = classes.split("+")
        if not (len(names) == len(set(names)) == 2 and set(names) <= known.keys()):
            raise ValueError(
                f"Argument `classes` must be two different labels of {dataset}, such "
                f"as 0+1. Received: classes={classes!r}"
            )
        classes = [known[name] for name in names]
        self.levels = LEVELS.get(data.stem(dataset), 256)
        low, high = images.x_train.min(), images.x_train.max()

        def whole(x, y):
            chosen = np.isin(y, classes)
            x = np.rint((x[chosen] - low) / (high - low) * (self.levels - 1))
            return _averaged(x, size), (y[chosen] == classes[1]).astype("int32")

        self.x_train, self.y_train = whole(images.x_train, images.y_train)
        self.x_test, self.y_test = whole(images.x_test, images.y_test)
        if train_size is not None:
            if not 2 <= train_size <= len(self.x_train):
                raise ValueError(
                    f"Argument `train_size` must be between 2 and {len(self.x_train)}, "
                    f"the training images of both classes. Received: {train_size}"
                )
            order = np.random.default_rng(0).permutation(len(self.x_train))
            self.x_train = self.x_train[order[:train_size]]
            self.y_train = self.y_train[order[:train_size]]
        self.image_shape = self.x_train.shape[1:]

    @property
    def log_volume(self):
        """log p of pixels in [0, 1] less this is that of pixels in [0, levels]."""
        return np.prod(self.image_shape) * np.log(self.levels)

    def batches(self, batch_size, seed, first_epoch=0):
        """Endless `data.Batches` of dequantised training images in [0, 1]."""
        batches = _Batches(self.x_train, self.y_train, batch_size, seed, self.levels)
        batches.first_epoch = first_epoch
        return batches

    def dequantised(self, x, seed=0):
        """Images with uniform noise, in [0, 1]: float32, of the same shape."""
        return dequantise(x, np.random.default_rng(seed), self.levels)

    def interpolated(self, alphas, count=None):
        """`alpha x1 + (1 - alpha) x2` of test images x1, x2 of the two classes.

        Args:
            alphas: List of numbers from 0 to 1.
            count: At most so many pairs, all there are where None. No image is in two.

        Returns:
            Float32 array `(len(alphas), pairs, height, width, channels)`.
        """
        first, second = (self.x_test[self.y_test == label] for label in (0, 1))
        count = min(len(first), len(second), count or len(first))
        alphas = np.reshape(alphas, (-1, 1, 1, 1, 1)).astype("float32")
        return alphas * first[:count] + (1 - alphas) * second[:count]


def dequantise(x, rng, levels):
    """`(x + u) / levels`, u uniform in [0, 1), in float32."""
    return ((x + rng.random(x.shape)) / levels).astype("float32")


class _Batches(data.Batches):
    """Noise is a function of the seed and the number of the batch, as the order is."""

    def __init__(self, x, y, batch_size, seed, levels):
        super().__init__(x, y, batch_size, seed)
        self.levels = levels

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        step = self.first_epoch * self.steps + i
        return dequantise(
            x, np.random.default_rng((self.seed, step, 1)), self.levels
        ), y


def _averaged(x, size):
    n, h, w, c = x.shape
    if size < 1 or h % size or w % size:
        raise ValueError(
            f"Argument `size` must divide the height and the width of the images, "
            f"{h} and {w}. Received: size={size}"
        )
    blocks = x.reshape(n, size, h // size, size, w // size, c)
    return np.rint(blocks.mean((2, 4))).astype("float32")
