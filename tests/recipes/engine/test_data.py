import numpy as np
import pytest
from scipy.stats import chisquare

from recipes.engine import classifier, data
from tests.support import images as files_of


@pytest.fixture
def made(tmp_path):
    """A small .npz of colour images, whose blue is constant, and what is in it."""
    x = np.random.default_rng(0).integers(0, 256, (60, 6, 5, 3), "uint8")
    x[..., 2] = 7
    y = np.arange(60)[:, None] % 4
    names = ("x_train", "y_train", "x_test", "y_test")
    arrays = dict(zip(names, (x[:50], y[:50], x[50:], y[50:]), strict=True))
    path = tmp_path / "cifar_like.npz"
    np.savez(path, **arrays)
    return str(path), arrays


def test_digits():
    images = data.load("digits")
    assert images.x_train.shape == (1437, 8, 8, 1)
    assert images.x_train.dtype == np.float32 and images.y_train.dtype == np.int32
    counts = np.bincount(images.y_test)
    assert counts.min() >= 34 and counts.max() <= 38
    assert len(counts) == images.num_classes == 10 and len(images.x_test) == 360


def test_npz_and_a_part_of_it(made):
    path, arrays = made
    images = data.load(path)
    assert images.num_classes == 4 and images.y_train.shape == (50,)
    assert data.augmented(path) and not data.augmented("digits")
    pixels = arrays["x_train"].astype("float64")
    mean, deviation = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2)) + [0, 0, 1]
    # The images are in no order, so that the first ones are of all classes.
    for name, count in ("train", 50), ("test", 10):
        found, labels = getattr(images, f"x_{name}"), getattr(images, f"y_{name}")
        expected = (arrays[f"x_{name}"] - mean) / deviation
        order = [np.abs(expected - x).sum((1, 2, 3)).argmin() for x in found]
        assert sorted(order) == list(range(count)) != order
        np.testing.assert_allclose(found, expected[order], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(labels, arrays[f"y_{name}"][order, 0])
    few, more = (data.load(path, train_size=size) for size in (20, 21))
    assert few.x_train.shape == (20, 6, 5, 3) and few.x_test.shape == (10, 6, 5, 3)
    np.testing.assert_array_equal(more.y_train[:20], few.y_train)


def test_held_out_images(tmp_path):
    path = str(tmp_path / "grey.npz")  # without an axis of channels
    x, y = np.random.default_rng(0).normal(size=(50, 2, 2)), np.arange(50)
    np.savez(path, x_train=x, y_train=y, x_test=x[:5] + 9, y_test=y[:5])
    found = data.load(path, validation_size=12)
    # Each image is in one of both, standardised over those that train.
    labels = np.concatenate([found.y_train, found.y_test])
    assert len(found.y_test) == 12 and sorted(labels) == list(range(50))
    chosen = x[found.y_train]
    expected = (x[labels] - chosen.mean()) / chosen.std()
    both = np.concatenate([found.x_train, found.x_test])
    np.testing.assert_allclose(both[..., 0], expected, rtol=1e-4, atol=1e-5)
    for size in (0, 50):
        with pytest.raises(ValueError, match="`validation_size` must be.* 1 and 49"):
            data.load(path, validation_size=size)


def test_tensorflow_datasets_on_disk(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    with pytest.raises(ValueError, match="data_dir=.*--download.*mnist.npz"):
        data.load("mnist", data_dir=str(tmp_path))
    assert not list(tmp_path.iterdir())  # nothing was downloaded
    image = np.zeros((28, 28, 1), "uint8")
    examples = [{"image": image, "label": i % 10} for i in range(30)]
    splits = {"train": examples, "test": examples[:20]}
    files_of.write_tfds(tmp_path, "mnist", splits)
    images = data.load("mnist", data_dir=str(tmp_path))
    assert images.x_train.shape == (30, 28, 28, 1) and images.num_classes == 10
    assert len(images.x_test) == 20


def test_bad_arguments(made, tmp_path):
    path, arrays = made
    arrays.pop("y_test")
    np.savez(tmp_path / "short.npz", **arrays)
    for arguments, message in (
        (("svhn",), "digits, cifar10.*dataset='svhn'"),
        ((path, None, 51), "train_size.*1 and 50.*train_size=51"),
        ((str(tmp_path / "absent.npz"),), "existing .npz.*absent.npz"),
        ((str(tmp_path / "short.npz"),), r"lacks \['y_test'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            data.load(*arguments)
    with pytest.raises(ValueError, match="batch_size.*1 and 4.*batch_size=5"):
        data.Batches(np.zeros((4, 2, 2, 1)), np.zeros(4), 5, seed=0)


def test_an_npz_that_is_no_set_of_images(made, tmp_path):
    arrays, path = made[1], tmp_path / "other.npz"
    x, y, one_hot = arrays["x_train"], arrays["y_train"], np.eye(4)[made[1]["y_test"]]
    for change, message in (
        ({"y_test": one_hot}, r"a label for each.*y_test \(10, 1, 4\)"),
        ({"y_train": y[1:]}, r"a label for each.*y_train \(49, 1\)"),
        ({"x_train": x[:0], "y_train": y[:0]}, r"a label for each.*\(0, 6, 5, 3\)"),
        ({"x_train": x.reshape(50, -1)}, r"\(n, height, width\).*x_train \(50, 90\)"),
        ({"x_test": arrays["x_test"][:, 1:]}, r"of one size.*x_test \(10, 5, 5, 3\)"),
        ({"y_train": y.astype(str)}, "integers as labels.*y_train <U"),
        ({"y_train": y + 0.5}, "integers as labels.*y_train float64"),
        ({"x_train": x * np.nan}, "of finite numbers"),
        ({"y_train": y - 1}, "labels from 0 on.*labels from -1 to 2"),
        ({"y_test": arrays["y_test"] + 1}, "those of training.*images 1 to 4"),
    ):
        np.savez(path, **arrays | change)
        with pytest.raises(ValueError, match=f"`dataset` must .*{message}"):
            data.load(str(path))
    for content in (path.read_bytes()[:-40], b"a text", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="an undamaged .npz file.*cannot be read"):
            data.load(str(path))


@pytest.mark.parametrize("augment", [False, True])
def test_batches_are_a_function_of_seed_and_number(augment):
    x = np.random.default_rng(1).normal(size=(23, 6, 5, 2)).astype("float32")
    x[:, 0, 0, 0] = y = np.arange(23, dtype="int32")  # which image it is

    def made(seed, **more):
        return data.Batches(x, y, 5, seed=seed, augment=augment, **more)

    batches, other, resumed = made(3), made(4), made(3, first_epoch=1)
    for i in reversed(range(8)):
        np.testing.assert_array_equal(batches[i + 4][0], resumed[i][0])
        if not augment:
            np.testing.assert_array_equal(batches[i][0][:, 0, 0, 0], batches[i][1])
    assert any((batches[i][1] != other[i][1]).any() for i in range(4))
    # An epoch is a permutation, less the remainder.
    assert batches.steps == 4
    epochs = np.reshape([batches[i][1] for i in range(8)], (2, 20))
    assert [len(set(epoch)) for epoch in epochs] == [20, 20]
    assert (epochs[0] != epochs[1]).any()
    # With replacement, each image is any of all, in every place.
    drawn = made(3, replacement=True)
    found = np.concatenate([drawn[i][1] for i in range(4 * 250)])
    assert chisquare(np.bincount(found, minlength=23)).pvalue > 2e-5


def test_other_batches_are_independent():
    settings = classifier.Training(train_size=40, batch_size=8, seed=3)
    others = [x.tobytes() for x, _ in data.other_batches(settings, 6)]
    assert len(set(others)) == 6
    own = data.source(settings).batches()
    assert not {own[i][0].tobytes() for i in range(5 * 4)} & {*others}
    assert others == [x.tobytes() for x, _ in data.other_batches(settings, 6)]


def test_crop_and_flip():
    rng = np.random.default_rng(0)
    image = rng.normal(size=(8, 8, 1))
    same = np.broadcast_to(image, (20, *image.shape))
    batches = data.Batches(same, np.zeros(20), 5, seed=0, augment=True)
    assert len({batches[i][0].tobytes() for i in range(8)}) == 8
    files_of.assert_every_crop_and_flip(lambda x: data.crop_and_flip(x, rng))
