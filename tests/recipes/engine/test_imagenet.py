import io

import numpy as np
import pytest

from recipes import train
from recipes.engine import classifier, data, devices, imagenet
from tests.support import images, small
from tests.support.backend import thorough_on

tf = pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_datasets")
PIL_Image = pytest.importorskip("PIL.Image")

pytestmark = thorough_on("jax")  # TensorFlow reads the images for every backend

# Width and height, and the mode of the JPEG: large, flat, tall, tiny.
KINDS = [((100, 80), "RGB"), ((90, 7), "RGB"), ((20, 75), "L"), ((1, 1), "RGB")]
KINDS += [((64, 48), "CMYK"), ((33, 34), "L")]
TRAIN, TEST = 14, 7
SIZE = 16


def encoded(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def jpeg(size, mode, rng):
    """A smooth image, as a JPEG."""
    colours = rng.integers(0, 256, (2, 2, 3), "uint8")
    image = PIL_Image.fromarray(colours).resize(size).convert(mode)
    return encoded(image, quality=95)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """ImageNet in the files of tensorflow_datasets, with few images."""
    root = tmp_path_factory.mktemp("tfds")
    rng = np.random.default_rng(0)
    contents = [jpeg(*kind, rng) for kind in (KINDS * 3)[:TRAIN]]
    splits = {
        split: [
            {"image": io.BytesIO(image), "label": i, "file_name": f"{i}.JPEG"}
            for i, image in enumerate(contents[:count])
        ]
        for split, count in (("train", TRAIN), ("validation", TEST))
    }
    images.write_tfds(root, imagenet.NAME, splits, per_shard=7)
    return str(root)


def stream(data_dir, **more):
    usual = {"image_size": SIZE, "batch_size": 4, "epochs": 3, "seed": 1}
    places = {"dataset": "imagenet2012", "data_dir": data_dir}
    return data.source(classifier.Training(**usual | places | more))


def read(dataset):
    return [(x.numpy(), y.numpy()) for x, y in dataset]


def test_batches_are_a_function_of_seed_and_epoch(data_dir):
    source = stream(data_dir)
    assert source.image_shape == (SIZE, SIZE, 3) and source.num_classes == 1000
    batches = read(source.batches())
    assert len(batches) == 3 * source.steps == 9
    for x, _ in batches:
        assert x.shape == (4, SIZE, SIZE, 3) and x.dtype == np.float32
        # Standardised colours from 0 to 255.
        assert x.min() > -2.2 and x.max() < 2.7
    epochs = np.reshape([y for _, y in batches], (3, -1))
    assert [len(set(epoch)) for epoch in epochs] == [12] * 3  # each image once
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()

    again = read(stream(data_dir).batches(2))
    for pair, other in zip(again, batches[6:], strict=True):
        assert all(map(np.array_equal, pair, other))
    other = read(stream(data_dir, seed=2).batches())
    assert any((a[1] != b[1]).any() for a, b in zip(batches, other, strict=True))

    tests = read(source.test)
    assert [len(y) for _, y in tests] == [4, 3]
    assert sorted(np.concatenate([y for _, y in tests])) == list(range(TEST))

    # Without augmentation, images are the same in all epochs.
    source = stream(data_dir, augment=False, train_size=5, batch_size=5, epochs=2)
    first, second = (x[np.argsort(y)] for x, y in read(source.batches()))
    np.testing.assert_array_equal(first, second)
    source = stream(data_dir, train_size=1, batch_size=1, epochs=2)
    first, second = (x for x, _ in read(source.batches()))
    assert (first != second).any()


def numbered():
    """A JPEG whose red is the column, and whose green is the row, times 4."""
    pixels = np.zeros((40, 60, 3), "uint8")
    pixels[..., 0] = 4 * np.arange(60)
    pixels[..., 1] = 4 * np.arange(40)[:, None]
    image = PIL_Image.fromarray(pixels)
    return tf.constant(encoded(image, quality=100, subsampling=0))


def edges(crop):
    """Left and top, and right and bottom, in pixels of the whole image."""
    lines = np.stack([crop[..., 0].mean(0), crop[..., 1].mean(1)]) / 4
    step = (lines[:, -2] - lines[:, 1]) / (lines.shape[1] - 3)
    return lines[:, 1] - 1.5 * step + 0.5, lines[:, -2] + 1.5 * step + 0.5


def test_random_crops_are_within_area_and_ratio_and_half_of_them_mirrored():
    image = numbered()
    crops, mirrored = [], 0
    for number in range(150):
        crop = imagenet.random_crop(image, 32, (5, number)).numpy()
        (left, top), (right, bottom) = edges(crop)
        mirrored += right < left
        left, right = sorted((left, right))
        # An edge is known to about a pixel: JPEG, and rounding of the crop.
        assert left > -1 and right < 61 and top > -1 and bottom < 41
        crops.append((right - left, bottom - top, top))
    widths, heights, tops = np.transpose(crops)
    area, ratio = widths * heights / (60 * 40), widths / heights
    assert 0.06 < area.min() < 0.15 and area.max() > 0.75
    assert 0.68 < ratio.min() < 0.85 and 1.2 < ratio.max() < 1.45
    assert np.ptp(tops) > 10
    assert 45 < mirrored < 105  # 5 deviations from 75


def test_middle_crop_and_standardised_colours():
    (left, top), (right, bottom) = edges(imagenet.middle_crop(numbered(), 32).numpy())
    # 35 pixels, 7/8 of 40, in the middle of 60 and 40.
    np.testing.assert_allclose((left, right), (12, 47), atol=0.8)
    np.testing.assert_allclose((top, bottom), (2, 37), atol=0.8)
    colours = imagenet.standardise(np.array([[0] * 3, [255] * 3], "float32"))
    expected = [[-2.1179, -2.0357, -1.8044], [2.2489, 2.4286, 2.64]]
    np.testing.assert_allclose(colours, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_decoded_as_pil_does(kind):
    content = jpeg(*kind, np.random.default_rng(3))
    crop = imagenet.middle_crop(tf.constant(content), SIZE).numpy()
    image = PIL_Image.open(io.BytesIO(content))
    side = max(round(7 / 8 * min(image.size)), 1)
    left, top = ((length - side) // 2 for length in image.size)
    image = image.convert("RGB").crop((left, top, left + side, top + side))
    expected = np.asarray(image.resize((SIZE, SIZE), PIL_Image.Resampling.BILINEAR))
    np.testing.assert_allclose(crop, expected, atol=8)
    for number in range(5):
        part = imagenet.random_crop(tf.constant(content), SIZE, (0, number)).numpy()
        assert part.shape == (SIZE, SIZE, 3) and np.ptp([part.min(), part.max()]) < 256


def test_processes_share_the_images(data_dir):
    whole = stream(data_dir)
    parts = [devices._Parts(stream(data_dir), 4, 4, process, 2) for process in range(2)]
    batches = [read(part.batches(1)) for part in parts]
    for (x, y), *mine in zip(read(whole.batches(1)), *batches, strict=True):
        # The same crops of the same images, in another order.
        together = {label: image for part in mine for image, label in zip(*part)}
        assert together.keys() == set(y) and len(y) == 4
        for image, label in zip(x, y):
            np.testing.assert_allclose(together[label], image, atol=1e-5)
    ((first,), (second,)) = (list(part.test.as_numpy_iterator()) for part in parts)
    _, labels, weights = map(np.concatenate, zip(first, second))
    np.testing.assert_array_equal(weights, [1] * TEST + [0])
    expected = np.concatenate([y for _, y in read(whole.test)])
    np.testing.assert_array_equal(labels[:TEST], expected)


def test_train(data_dir, tmp_path, monkeypatch):
    small.use(monkeypatch, small.dense)
    values = {"dataset": "imagenet2012", "data_dir": data_dir, "image_size": SIZE}
    values |= {"norm": "bn", "batch_size": 4, "epochs": 2, "learning_rate": 1e-3}
    values |= small.places(tmp_path)
    results = train.train(classifier.Saved(**values)).results
    assert results["epochs"] == 2 and "image_size16" in results["name"]


def test_bad_arguments(data_dir, tmp_path):
    with pytest.raises(ValueError, match="data_dir.*imagenet2012.*ILSVRC2012_img_val"):
        stream(str(tmp_path))
    assert not list(tmp_path.iterdir())
    for name in ("train_size", "batch_size"):
        with pytest.raises(ValueError, match=f"{name}.*1 and 14.*{name}=15"):
            stream(data_dir, **{name: 15})
