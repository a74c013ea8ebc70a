import keras
import numpy as np
import pytest

from recipes.engine import data
from tests.support import images as files_of


@pytest.fixture
def made(tmp_path):
    """A small .npz of colour images, and what is in it."""
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (50, 6, 5, 3), "uint8"),
        "y_train": np.arange(50, dtype="int64")[:, None] % 4,
        "x_test": rng.integers(0, 256, (10, 6, 5, 3), "uint8"),
        "y_test": np.arange(10, dtype="int64")[:, None] % 4,
    }
    path = tmp_path / "cifar_like.npz"
    np.savez(path, **arrays)
    return str(path), arrays


def test_digits():
    images = data.load("digits")
    assert images.x_train.shape == (1437, 8, 8, 1)
    assert images.x_test.shape == (360, 8, 8, 1)
    assert images.x_train.dtype == np.float32 and images.y_train.dtype == np.int32
    assert images.num_classes == 10
    np.testing.assert_allclose(images.x_train.mean(), 0, atol=1e-5)
    np.testing.assert_allclose(images.x_train.std(), 1, atol=1e-5)
    counts = np.bincount(images.y_test)
    assert counts.min() >= 34 and counts.max() <= 38


def test_npz_and_a_part_of_it(made):
    path, arrays = made
    images = data.load(path)
    assert images.num_classes == 4 and images.y_train.shape == (50,)
    pixels = arrays["x_train"].astype("float64")
    mean, deviation = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    expected = (arrays["x_test"] - mean) / deviation
    np.testing.assert_allclose(images.x_test, expected, rtol=1e-4, atol=1e-5)
    assert data.augmented(path) and not data.augmented("digits")
    few, again, more = (data.load(path, train_size=size) for size in (20, 20, 21))
    assert few.x_train.shape == (20, 6, 5, 3) and few.x_test.shape == (10, 6, 5, 3)
    np.testing.assert_array_equal(few.x_train, again.x_train)
    np.testing.assert_array_equal(more.y_train[:20], few.y_train)


def test_npz_of_grey_images_without_a_channel_axis(tmp_path):
    path = str(tmp_path / "grey.npz")
    x, y = np.zeros((4, 3, 3)), np.arange(4)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    images = data.load(path)
    assert images.x_train.shape == (4, 3, 3, 1)
    assert np.isfinite(images.x_train).all()  # a constant channel divides by nothing


def test_held_out_images(tmp_path):
    path = str(tmp_path / "few.npz")
    x, y = np.random.default_rng(0).normal(size=(50, 2, 2, 1)), np.arange(50)
    np.savez(path, x_train=x, y_train=y, x_test=x[:5] + 9, y_test=y[:5])
    found, again = (data.load(path, validation_size=12) for _ in range(2))
    np.testing.assert_array_equal(again.x_test, found.x_test)
    # Each image is in one of both, standardised over those that train.
    labels = np.concatenate([found.y_train, found.y_test])
    assert len(found.y_test) == 12 and sorted(labels) == list(range(50))
    chosen = x[found.y_train]
    expected = (x[labels] - chosen.mean()) / chosen.std()
    both = np.concatenate([found.x_train, found.x_test])
    np.testing.assert_allclose(both, expected, rtol=1e-4, atol=1e-5)
    assert found.num_classes == 50
    for size in (0, 50):
        with pytest.raises(ValueError, match="`validation_size` must be.* 1 and 49"):
            data.load(path, validation_size=size)


def test_tensorflow_datasets_on_disk(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    image = np.arange(784, dtype="uint8").reshape(28, 28, 1)
    examples = [{"image": image + i, "label": i % 10} for i in range(30)]
    splits = {"train": examples, "test": examples[:20]}
    files_of.write_tfds(tmp_path, "mnist", splits)
    images = data.load("mnist", data_dir=str(tmp_path))
    assert images.x_train.shape == (30, 28, 28, 1)
    assert images.x_test.shape == (20, 28, 28, 1)
    assert images.num_classes == 10


@pytest.mark.parametrize("dataset", ["cifar10", "mnist"])
def test_data_dir_without_the_data_set(tmp_path, dataset):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(ValueError, match="data_dir") as error:
        data.load(dataset, data_dir=str(tmp_path))
    for part in (f"data_dir={str(tmp_path)!r}", "--download", f"{dataset}.npz"):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())  # nothing was downloaded


def test_bad_arguments(made, tmp_path):
    path, arrays = made
    with pytest.raises(ValueError, match="digits, cifar10.*dataset='svhn'"):
        data.load("svhn")
    with pytest.raises(ValueError, match="imagenet2012 cannot be arrays"):
        data.load("imagenet2012")
    with pytest.raises(ValueError, match="train_size.*1 and 50.*train_size=51"):
        data.load(path, train_size=51)
    with pytest.raises(ValueError, match="existing .npz.*absent.npz"):
        data.load(str(tmp_path / "absent.npz"))
    arrays.pop("y_test")
    np.savez(tmp_path / "short.npz", **arrays)
    with pytest.raises(ValueError, match=r"lacks \['y_test'\]"):
        data.load(str(tmp_path / "short.npz"))
    with pytest.raises(ValueError, match="batch_size.*1 and 4.*batch_size=5"):
        data.Batches(np.zeros((4, 2, 2, 1)), np.zeros(4), 5, seed=0)


def numbered(n=23):
    """Images that are known by their first pixel."""
    x = np.random.default_rng(1).normal(size=(n, 6, 5, 2)).astype("float32")
    x[:, 0, 0, 0] = np.arange(n)
    return x, np.arange(n, dtype="int32")


def test_an_epoch_is_a_permutation_less_the_remainder():
    batches = data.Batches(*numbered(23), 5, seed=3)
    assert batches.steps == 4
    labels = np.array([batches[i][1] for i in range(8)])
    epochs = labels[:4].ravel(), labels[4:].ravel()
    assert [len(set(epoch)) for epoch in epochs] == [20, 20]
    assert list(epochs[0]) != list(epochs[1])
    for i in range(8):
        np.testing.assert_array_equal(batches[i][0][:, 0, 0, 0], batches[i][1])


@pytest.mark.parametrize("augment", [False, True])
def test_batches_are_a_function_of_seed_and_number(augment):
    def made(seed, **more):
        return data.Batches(*numbered(), 5, seed=seed, augment=augment, **more)

    batches, other = made(3), made(4)
    backwards = [batches[i] for i in reversed(range(12))][::-1]
    resumed = made(3, first_epoch=1)
    for i in range(12):
        np.testing.assert_array_equal(batches[i][0], backwards[i][0])
        np.testing.assert_array_equal(batches[i][1], backwards[i][1])
        if i >= 4:
            np.testing.assert_array_equal(batches[i][0], resumed[i - 4][0])
    assert any((batches[i][1] != other[i][1]).any() for i in range(4))


def test_crop_and_flip():
    rng = np.random.default_rng(0)
    files_of.assert_every_crop_and_flip(lambda x: data.crop_and_flip(x, rng))


def test_fit_sees_these_batches():
    """A step of this model adds the mean of its batch to the weights."""
    x, y = numbered()
    batches = data.Batches(x, y, 5, seed=3, augment=True, first_epoch=1)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    inputs = keras.layers.Input(x.shape[1:])
    model = keras.Sequential([inputs, keras.layers.Flatten(), dense])
    model.compile(
        keras.optimizers.SGD(1.0), loss=lambda y, output: -keras.ops.mean(output)
    )
    seen = [np.zeros(60, "float32")]

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.array(keras.ops.convert_to_numpy(dense.kernel)[:, 0]))

    model.fit(
        batches,
        steps_per_epoch=batches.steps,
        initial_epoch=1,
        epochs=4,
        validation_data=(x, y),
        shuffle=False,
        callbacks=[Watch()],
        verbose=0,
    )
    assert len(seen) == 1 + 4 * 3
    expected = [batches[i][0].reshape(5, -1).mean(0) for i in range(12)]
    np.testing.assert_allclose(np.diff(seen, axis=0), expected, atol=1e-4)
