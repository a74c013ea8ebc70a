import io

import keras
import numpy as np
import pytest

from recipes import models, train
from recipes.engine import classifier, data, imagenet
from tests.support import small

tf = pytest.importorskip("tensorflow")
tfds = pytest.importorskip("tensorflow_datasets")
PIL_Image = pytest.importorskip("PIL.Image")

# Width and height, and the mode of the JPEG: large, flat, tall, tiny.
KINDS = [
    ((100, 80), "RGB"),
    ((90, 7), "RGB"),
    ((20, 75), "L"),
    ((1, 1), "RGB"),
    ((64, 48), "CMYK"),
    ((33, 34), "L"),
]
TRAIN, TEST = 14, 7
SIZE = 16


def jpeg(kind, rng):
    """A smooth image, as a JPEG."""
    (width, height), mode = kind
    colours = rng.integers(0, 256, (2, 2, 3), "uint8")
    image = PIL_Image.fromarray(colours).resize((width, height)).convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """ImageNet in the files of tensorflow_datasets, with few images."""
    root = tmp_path_factory.mktemp("tfds")
    builder = tfds.builder(imagenet.NAME, data_dir=str(root))
    features = builder.info.features
    directory = root / imagenet.NAME / str(builder.version)
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    splits = []
    for split, count in (("train", TRAIN), ("validation", TEST)):
        shards = [count // 2, count - count // 2]
        number = 0
        for shard, length in enumerate(shards):
            name = f"{imagenet.NAME}-{split}.tfrecord-{shard:05}-of-00002"
            with tf.io.TFRecordWriter(str(directory / name)) as writer:
                for _ in range(length):
                    encoded = jpeg(KINDS[number % len(KINDS)], rng)
                    example = {
                        "image": io.BytesIO(encoded),
                        "label": number,
                        "file_name": f"{number}.JPEG",
                    }
                    example = features.encode_example(example)
                    writer.write(features.serialize_example(example))
                    number += 1
        splits.append(
            tfds.core.SplitInfo(name=split, shard_lengths=shards, num_bytes=0)
        )
    tfds.folder_dataset.write_metadata(
        data_dir=directory,
        features=features,
        split_infos=splits,
        filename_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        supervised_keys=("image", "label"),
    )
    return str(root)


def stream(data_dir, **more):
    usual = {"image_size": SIZE, "batch_size": 4, "epochs": 3, "seed": 1}
    places = {"dataset": "imagenet2012", "data_dir": data_dir}
    return data.source(classifier.Training(**usual | places | more))


def read(dataset):
    return [(x.numpy(), y.numpy()) for x, y in dataset]


def test_batches(data_dir):
    source = stream(data_dir)
    assert isinstance(source, imagenet.Stream)
    assert source.image_shape == (SIZE, SIZE, 3) and source.num_classes == 1000
    assert source.steps == TRAIN // 4
    batches = read(source.batches())
    assert len(batches) == 3 * source.steps
    for x, _ in batches:
        assert x.shape == (4, SIZE, SIZE, 3) and x.dtype == np.float32
        # Standardised colours from 0 to 255.
        assert x.min() > -2.2 and x.max() < 2.7
    epochs = np.reshape([y for _, y in batches], (3, -1))
    for epoch in epochs:
        assert len(set(epoch)) == 12  # an image once in an epoch
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()

    tests = read(source.test)
    assert [len(y) for _, y in tests] == [4, 3]
    assert sorted(np.concatenate([y for _, y in tests])) == list(range(TEST))


def test_batches_are_a_function_of_seed_and_epoch(data_dir):
    batches = read(stream(data_dir).batches())
    again = read(stream(data_dir).batches())
    resumed = read(stream(data_dir).batches(first_epoch=2))
    for (x, y), (x2, y2) in zip(batches, again, strict=True):
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    for (x, y), (x2, y2) in zip(batches[6:], resumed, strict=True):
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    other = read(stream(data_dir, seed=2).batches())
    assert any((a[1] != b[1]).any() for a, b in zip(batches, other, strict=True))


def numbered(width=60, height=40):
    """A JPEG whose red is the column, and whose green is the row, times 4."""
    pixels = np.zeros((height, width, 3), "uint8")
    pixels[..., 0] = 4 * np.arange(width)
    pixels[..., 1] = 4 * np.arange(height)[:, None]
    file = io.BytesIO()
    PIL_Image.fromarray(pixels).save(file, "JPEG", quality=100, subsampling=0)
    return file.getvalue()


def edges(image):
    """The columns and rows, in pixels of the whole image, where a crop ends."""
    red, green = image[..., 0].mean(0) / 4, image[..., 1].mean(1) / 4
    found = []
    for line in (red, green):
        step = (line[-2] - line[1]) / (len(line) - 3)
        found.append((line[1] - 1.5 * step + 0.5, line[-2] + 1.5 * step + 0.5))
    return found


def test_random_crops_are_within_area_and_ratio_and_half_of_them_mirrored():
    encoded = tf.constant(numbered())
    widths, heights, mirrored, tops = [], [], [], []
    for number in range(150):
        crop = imagenet.random_crop(encoded, 32, (5, number)).numpy()
        (left, right), (top, bottom) = edges(crop)
        mirrored.append(right < left)
        left, right = sorted((left, right))
        # An edge is known to about a pixel: JPEG, and rounding of the crop.
        assert left > -1 and right < 61 and top > -1 and bottom < 41
        widths.append(right - left), heights.append(bottom - top), tops.append(top)
    widths, heights = np.array(widths), np.array(heights)
    area = widths * heights / (60 * 40)
    assert area.min() > 0.06 and area.min() < 0.15 and area.max() > 0.75
    ratio = widths / heights
    assert ratio.min() > 0.68 and ratio.max() < 1.45
    assert ratio.min() < 0.85 and ratio.max() > 1.2
    assert np.ptp(tops) > 10
    assert 45 < sum(mirrored) < 105  # 5 deviations from 75


def test_middle_crop():
    crop = imagenet.middle_crop(tf.constant(numbered()), 32).numpy()
    (left, right), (top, bottom) = edges(crop)
    # 35 pixels, 7/8 of 40, in the middle of 60 and 40.
    np.testing.assert_allclose((left, right), (12, 47), atol=0.8)
    np.testing.assert_allclose((top, bottom), (2, 37), atol=0.8)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_is_decoded_as_pil_does(kind):
    encoded = jpeg(kind, np.random.default_rng(3))
    crop = imagenet.middle_crop(tf.constant(encoded), SIZE).numpy()
    image = PIL_Image.open(io.BytesIO(encoded))
    side = max(round(7 / 8 * min(image.size)), 1)
    left, top = ((length - side) // 2 for length in image.size)
    image = image.convert("RGB").crop((left, top, left + side, top + side))
    expected = np.asarray(image.resize((SIZE, SIZE), PIL_Image.Resampling.BILINEAR))
    np.testing.assert_allclose(crop, expected, atol=8)
    for number in range(5):
        part = imagenet.random_crop(tf.constant(encoded), SIZE, (0, number)).numpy()
        assert part.shape == (SIZE, SIZE, 3) and np.ptp([part.min(), part.max()]) < 256


def test_standardise():
    white = imagenet.standardise(np.full((2, 2, 3), 255.0, "float32"))
    np.testing.assert_allclose(white[0, 0], [2.2489, 2.4286, 2.64], atol=1e-4)
    black = imagenet.standardise(np.zeros((2, 2, 3), "float32"))
    np.testing.assert_allclose(black[0, 0], [-2.1179, -2.0357, -1.8044], atol=1e-4)


def test_without_augmentation_training_images_are_those_of_a_test(data_dir):
    batches = read(
        stream(data_dir, augment=False, train_size=5, batch_size=5).batches()
    )
    assert len(batches) == 3
    images = [dict(zip(y, x, strict=True)) for x, y in batches]
    for label in images[0]:
        np.testing.assert_array_equal(images[0][label], images[1][label])


def test_train(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "build", small.build)
    settings = classifier.Saved(
        dataset="imagenet2012",
        norm="bn",
        image_size=SIZE,
        batch_size=4,
        epochs=2,
        learning_rate=1e-3,
        data_dir=data_dir,
        runs_dir=str(tmp_path / "runs"),
        saved_models_dir=str(tmp_path / "models"),
    )
    results = train.train(settings).results
    assert results["epochs"] == 2 and not results["diverged"]
    name = "imagenet2012-resnet20-bn-sigmoid-seed0-"
    assert results["name"].startswith(name) and "image_size16" in results["name"]
    model = keras.models.load_model(results["saved_model"])
    x, y = map(np.concatenate, zip(*read(stream(data_dir).test), strict=True))
    hits = model.predict(x, verbose=0).argmax(-1) == y
    np.testing.assert_allclose(results["best_test_accuracy"], hits.mean(), atol=1e-6)


def test_fit_reads_on_in_the_next_epoch(data_dir):
    """Labels are the loss here, so that their sum is seen."""
    source = stream(data_dir)
    sums = [sum(y) for _, y in read(source.batches())]
    model = keras.Sequential(
        [
            keras.layers.Input(source.image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="zeros"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.0),
        loss=lambda y, output: keras.ops.cast(y, "float32") + 0 * output[:, 0],
    )
    history = model.fit(
        source.batches(), steps_per_epoch=3, epochs=3, shuffle=False, verbose=0
    )
    expected = np.reshape(sums, (3, 3)).mean(1) / 4
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize("total", [120, 1000])
def test_schedule(total):
    schedule = imagenet.schedule(0.1, total)
    rates = [float(schedule(step)) for step in range(total)]
    expected = np.repeat([0.1, 0.01, 0.001, 0.0001], total // 4)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_settings_are_those_of_the_data_set():
    settings = classifier.Training(dataset="imagenet2012")
    assert (settings.batch_size, settings.weight_decay) == (256, 1e-4)
    assert (settings.image_size, settings.epochs) == (224, 120)
    assert settings.augment


def test_bad_arguments(data_dir, tmp_path):
    with pytest.raises(ValueError, match="data_dir.*imagenet2012.*ILSVRC2012_img_val"):
        stream(str(tmp_path))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="train_size.*1 and 14.*train_size=15"):
        stream(data_dir, train_size=15)
    with pytest.raises(ValueError, match="batch_size.*1 and 14.*batch_size=15"):
        stream(data_dir, batch_size=15)
    with pytest.raises(ValueError, match="imagenet2012 cannot be arrays"):
        data.load("imagenet2012")
    with pytest.raises(ValueError, match="image_size.*digits.*image_size=32"):
        classifier.Training(image_size=32)
    with pytest.raises(ValueError, match="mixed_bfloat16.*dtype='float16'"):
        classifier.Training(dtype="float16")
