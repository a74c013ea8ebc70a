"""Images of two classes as a flow reads them, and interpolations between them."""

import numpy as np

from recipes.engine import data
from recipes.engine.errors import UserError, check_size


class Pair:
    """The images of two classes, with whole numbers from 0 to `levels - 1` as pixels.

    The lowest and the highest value of a channel in the training images are its ends.
    y is 0 for the first class and 1 for the second.

    Args:
        dataset, data_dir, download: See `recipes.engine.data.load`.
        classes: Two different labels, such as `"0+1"`.
        size: Height and width. Blocks of pixels are averaged (and rounded) to get them.
        train_size: Use only this many training images, the first ones of a fixed
            permutation. None: all.
    """

    def __init__(
        self, dataset, classes, size, train_size=None, data_dir=None, download=False
    ):
        images = data.load(dataset, data_dir, None, download)
        known = {str(label): label for label in np.unique(images.y_train)}
        names = classes.split("+")
        if not (len(names) == len(set(names)) == 2 and set(names) <= known.keys()):
            raise UserError(
                f"Argument `classes` must be two different labels of {dataset}, such "
                f"as 0+1. Received: classes={classes!r}"
            )
        classes = [known[name] for name in names]
        self.levels = 17 if data.stem(dataset) == "digits" else 256
        low, high = images.x_train.min((0, 1, 2)), images.x_train.max((0, 1, 2))
        span = np.maximum(high - low, 1e-7)

        def whole(x, y):
            chosen = np.isin(y, classes)
            x = np.rint((x[chosen] - low) / span * (self.levels - 1))
            n, h, w, c = x.shape
            if size < 1 or h % size or w % size:
                raise UserError(
                    f"Argument `size` must divide the height and the width of the "
                    f"images, {h} and {w}. Received: size={size}"
                )
            blocks = x.reshape(n, size, h // size, size, w // size, c)
            x = np.rint(blocks.mean((2, 4))).astype("float32")
            return x, (y[chosen] == classes[1]).astype("int32")

        self.x_train, self.y_train = whole(images.x_train, images.y_train)
        self.x_test, self.y_test = whole(images.x_test, images.y_test)
        if train_size is not None:
            count, about = len(self.x_train), "the training images of both classes"
            check_size("train_size", train_size, count, about)
            order = np.random.default_rng(0).permutation(count)[:train_size]
            self.x_train, self.y_train = self.x_train[order], self.y_train[order]
        self.image_shape = self.x_train.shape[1:]

    @property
    def log_volume(self):
        """log p of pixels in [0, 1] minus log p of pixels in [0, levels]."""
        return np.prod(self.image_shape) * np.log(self.levels)

    def dequantised(self, x, seed=0):
        """`(x + u) / levels`, u uniform in [0, 1), in float32."""
        u = np.random.default_rng(seed).random(x.shape)
        return ((x + u) / self.levels).astype("float32")

    def interpolated(self, alphas):
        """`alpha x1 + (1 - alpha) x2` for test images x1, x2 of the two classes.

        An array `(alphas, pairs, height, width, channels)`. No image is in two pairs.
        """
        first, second = (self.x_test[self.y_test == label] for label in (0, 1))
        count = min(len(first), len(second))
        alphas = np.reshape(alphas, (-1, 1, 1, 1, 1)).astype("float32")
        return alphas * first[:count] + (1 - alphas) * second[:count]


class Batches(data.Batches):
    """Dequantised training images in [0, 1], the noise of the seed and the number."""

    def __init__(self, pair, batch_size, seed, first_epoch=0):
        x, y = pair.x_train, pair.y_train
        super().__init__(x, y, batch_size, seed, first_epoch=first_epoch)
        self.pair = pair

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        step = self.first_epoch * self.steps + i
        return self.pair.dequantised(x, (self.seed, step, 1)), y
