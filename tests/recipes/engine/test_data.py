import keras
import numpy as np
import pytest

from recipes.engine import data


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


def test_npz(made):
    path, arrays = made
    images = data.load(path)
    assert images.num_classes == 4
    assert images.y_train.shape == (50,)
    pixels = arrays["x_train"].astype("float64")
    mean, deviation = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    expected = (arrays["x_test"] - mean) / deviation
    np.testing.assert_allclose(images.x_test, expected, rtol=1e-4, atol=1e-5)
    assert data.augmented(path) and not data.augmented("digits")


def test_npz_of_grey_images_without_a_channel_axis(tmp_path):
    path = str(tmp_path / "grey.npz")
    x, y = np.zeros((4, 3, 3)), np.arange(4)
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    images = data.load(path)
    assert images.x_train.shape == (4, 3, 3, 1)
    assert np.isfinite(images.x_train).all()  # a constant channel divides by nothing


def test_train_size_is_fixed(made):
    path, _ = made
    few = data.load(path, train_size=20)
    again = data.load(path, train_size=20)
    assert few.x_train.shape == (20, 6, 5, 3) and few.x_test.shape == (10, 6, 5, 3)
    np.testing.assert_array_equal(few.x_train, again.x_train)
    more = data.load(path, train_size=21)
    np.testing.assert_array_equal(more.y_train[:20], few.y_train)


def test_tensorflow_datasets_on_disk(tmp_path):
    tf = pytest.importorskip("tensorflow")
    tfds = pytest.importorskip("tensorflow_datasets")
    rng = np.random.default_rng(0)
    directory = tmp_path / "mnist" / "3.0.1"
    directory.mkdir(parents=True)
    features = tfds.features.FeaturesDict(
        {
            "image": tfds.features.Image(shape=(28, 28, 1)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
    )
    splits = []
    for split, count in (("train", 30), ("test", 20)):
        path = directory / f"mnist-{split}.tfrecord-00000-of-00001"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for i in range(count):
                image = rng.integers(0, 256, (28, 28, 1), "uint8")
                example = features.encode_example({"image": image, "label": i % 10})
                writer.write(features.serialize_example(example))
        splits.append(
            tfds.core.SplitInfo(name=split, shard_lengths=[count], num_bytes=0)
        )
    tfds.folder_dataset.write_metadata(
        data_dir=directory,
        features=features,
        split_infos=splits,
        filename_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        supervised_keys=("image", "label"),
    )
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
    x, y = numbered(23)
    batches = data.Batches(x, y, 5, seed=3)
    assert batches.steps == 4
    labels = np.array([batches[i][1] for i in range(8)])
    epochs = labels[:4].ravel(), labels[4:].ravel()
    for epoch in epochs:
        assert len(set(epoch)) == 20
    assert list(epochs[0]) != list(epochs[1])
    for i in range(8):
        np.testing.assert_array_equal(batches[i][0][:, 0, 0, 0], batches[i][1])


@pytest.mark.parametrize("augment", [False, True])
def test_batches_are_a_function_of_seed_and_number(augment):
    x, y = numbered()
    batches = data.Batches(x, y, 5, seed=3, augment=augment)
    backwards = [batches[i] for i in reversed(range(12))][::-1]
    resumed = data.Batches(x, y, 5, seed=3, augment=augment, first_epoch=1)
    other = data.Batches(x, y, 5, seed=4, augment=augment)
    for i in range(12):
        np.testing.assert_array_equal(batches[i][0], backwards[i][0])
        np.testing.assert_array_equal(batches[i][1], backwards[i][1])
        if i >= 4:
            np.testing.assert_array_equal(batches[i][0], resumed[i - 4][0])
    assert any((batches[i][1] != other[i][1]).any() for i in range(4))


def test_crop_and_flip():
    x, _ = numbered(200)
    out = data.crop_and_flip(x, np.random.default_rng(0))
    assert out.shape == x.shape
    padded = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    found = []
    for image, source in zip(out, padded, strict=True):
        crops = {
            (top, left, step): source[top : top + 6, left : left + 5][:, ::step]
            for top in range(9)
            for left in range(9)
            for step in (1, -1)
        }
        matches = [key for key, crop in crops.items() if np.array_equal(crop, image)]
        assert matches
        found.append(matches[0])
    tops, lefts, steps = np.transpose(found)
    assert set(tops) == set(lefts) == set(range(9)) and set(steps) == {1, -1}


@pytest.mark.parametrize("first_epoch", [0, 1])
def test_fit_sees_these_batches(first_epoch):
    """A step of this model adds the mean of its batch to the weights."""
    x, y = numbered()
    batches = data.Batches(x, y, 5, seed=3, augment=True, first_epoch=first_epoch)
    model = keras.Sequential(
        [
            keras.layers.Input(x.shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(1.0), loss=lambda y, output: -keras.ops.mean(output)
    )
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.layers[-1].kernel
            seen.append(np.array(keras.ops.convert_to_numpy(kernel)[:, 0]))

    model.fit(
        batches,
        steps_per_epoch=batches.steps,
        initial_epoch=first_epoch,
        epochs=4,
        validation_data=(x, y),
        shuffle=False,
        callbacks=[Watch()],
        verbose=0,
    )
    assert len(seen) == 4 * (4 - first_epoch)
    expected = [batches[i][0].reshape(5, -1).mean(0) for i in range(len(seen))]
    steps = np.diff(np.stack([np.zeros_like(seen[0]), *seen]), axis=0)
    np.testing.assert_allclose(steps, expected, atol=1e-4)


def test_held_out_images():
    whole = data.load("digits", train_size=50)
    held_out = data.load("digits", train_size=50, validation_size=12)
    assert len(held_out.x_train) == 38 and len(held_out.x_test) == 12
    assert held_out.num_classes == 10

    def rows(x):
        return {np.round(image, 3).tobytes() for image in x}

    # Undo the standardisation: which images they are.
    both = np.concatenate([held_out.x_train, held_out.x_test])
    scale = whole.x_train.std() / both.std()
    both = (both - both.mean()) * scale
    np.testing.assert_allclose(
        np.sort(both.reshape(50, -1), 0),
        np.sort(whole.x_train.reshape(50, -1), 0),
        atol=1e-3,
    )
    assert not rows(held_out.x_train) & rows(held_out.x_test)
    np.testing.assert_allclose(held_out.x_train.mean(), 0, atol=1e-5)
    again = data.load("digits", train_size=50, validation_size=12)
    np.testing.assert_array_equal(again.x_test, held_out.x_test)
    for size in (0, 50):
        with pytest.raises(
            ValueError, match="`validation_size` must be between 1 and 49"
        ):
            data.load("digits", train_size=50, validation_size=size)
