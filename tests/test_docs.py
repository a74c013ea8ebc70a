"""The guides do what they say, and no name and no page is missing on the site."""

import re
import subprocess
import sys

import pytest

import keras_norms
from keras_norms import diagnostics, layers, ops, surgery
from tests.support.backend import tensorflow_only
from tests.support.docs import DOCS

GUIDES = [page for page in DOCS.glob("guides/*.md") if "```text" in page.read_text()]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def test_every_public_name_is_in_the_reference():
    pages = "".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    found = re.findall(r"^::: keras_norms\.(\S+)", pages, re.M)
    assert len(set(found)) == len(found)
    public = {*keras_norms.__all__, *layers.__all__, *surgery.__all__}
    public |= {*diagnostics.__all__, *ops.__all__} - {"backend"}
    assert {name.split(".")[-1] for name in found} >= public - {"diagnostics"}
    # `keras_norms.fold` would show all of the module of that name.
    modules = {
        path.stem
        for package in ("surgery", "diagnostics")
        for path in DOCS.parent.glob(f"keras_norms/{package}/[a-z]*.py")
    }
    parts = [name.split(".") for name in found if not name.endswith(".theorems")]
    assert not [each for each in parts if {each[-1]} & modules - {*each[:-1]}]


def test_every_page_of_results_is_in_the_index():
    linked = re.findall(r"\]\((\w+\.md)\)", (DOCS / "results/README.md").read_text())
    pages = {page.name for page in DOCS.glob("results/*.md")} - {"README.md"}
    assert sorted(linked) == sorted(pages)


# What must come out, of the numbers that each block prints.
CHECKS = {
    # Sigmoid: after the first epoch, after the last, and the loss.
    "swap": lambda n: n[0][5] > n[0][2] + 20 and n[0][6] > n[0][3] and n[0][7] < 0.1,
    "trained": lambda n: (
        n[2][1] > n[0][0] + 1 and max(n[i][0] for i in (1, 3, 4, 5)) < 1e-5
    ),
    # Losses of BatchNormalization, CBN without AMAT and CBN; collectives.
    "batches": lambda n: (
        n[0][6] < min(n[0][0], n[0][4]) / 3 and n[1][3] >= 10 > 5 >= n[1][5]
    ),
    "tuner": lambda n: all(n[1][i + 1] > n[1][i] + 40 for i in (0, 2)),
    # Losses; least cosines of G and G'; cosines of kernels and steps.
    "look_inside": lambda n: (
        n[0][0] > 1 > max(n[0][1:3]) and n[1][0] > n[1][1] and n[2][1] < 0.01 < n[2][0]
    ),
    # The scan is the loop, the norms know the rate, and the loss is lower.
    "loop_jax": lambda n: (
        n[1][0] < 1e-3 and len({n[2][0], *n[2][1::2]}) == 1 and n[3][2] < n[3][0] / 3
    ),
    "loop_tensorflow": lambda n: n[0][2] < n[0][0] / 3,
    "loop_torch": lambda n: n[0][2] < n[0][0] / 3,
    "new_norm": lambda n: n[0][3] < n[0][1],
}


@pytest.mark.thorough
@tensorflow_only  # which is what a guide takes that does not say otherwise
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide(page, tmp_path):
    command = [sys.executable, DOCS / "execute.py", page, "--output", tmp_path]
    subprocess.run(command, check=True, cwd=DOCS.parent)
    text, now = page.read_text(), (tmp_path / page.name).read_text()
    # The page is what its blocks print, but for numbers.
    assert NUMBER.sub("0", now).split() == NUMBER.sub("0", text).split()
    pictures = set(re.findall(r"\]\((\w+\.png)\)", text))
    assert pictures == {picture.name for picture in tmp_path.glob("*.png")}
    blocks = re.findall(r"```text\n(.*?)```", now, re.S)
    found = [[*map(float, NUMBER.findall(block))] for block in blocks]
    assert CHECKS[page.stem](found), found


# In the place of ImageNet and of ResNet-50.
SMALL = """
import sys, types
import numpy as np

def load(name, split, data_dir):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (40, 20, 20, 3)), rng.integers(0, 10, 40)
    images = images.astype("uint8")
    return tf.data.Dataset.from_tensor_slices({"image": images, "label": labels})

def network(weights, input_shape, classes, classifier_activation):
    x = inputs = keras.Input(input_shape)
    for strides in (2, 1, 2):
        x = keras.layers.Conv2D(8, 3, strides, "same")(x)
        x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    outputs = keras.layers.Dense(classes, classifier_activation)(x)
    return keras.Model(inputs, outputs)

sys.modules["tensorflow_datasets"] = types.SimpleNamespace(load=load)
keras.applications.ResNet50 = network
"""
COMPARED = """
assert any(type(layer).__name__ == "FusedCBN" for layer in trained.layers)
assert all(type(layer).__module__.startswith("keras.src") for layer in deployed.layers)
x = np.random.default_rng(1).normal(size=(8, SIZE, SIZE, 3))
outputs = [model.predict(x).astype("float32") for model in (trained, deployed)]
# Of bfloat16, which has eight bits.
np.testing.assert_allclose(*outputs, atol=0.03 * np.abs(outputs[0]).max())
"""


@pytest.mark.thorough
@tensorflow_only  # by which it takes its own backend
def test_the_program_for_accelerators_on_a_cpu(tmp_path):
    text = (DOCS / "guides/accelerators.md").read_text()
    first, *others = re.findall(r"```python\n(.*?)```", text, re.S)
    program = "\n".join([first, SMALL, *others, COMPARED])
    sizes = "1024, 90, 1000, 224, 1281167"
    assert sizes in program
    program = program.replace(sizes, "8, 6, 10, 16, 40")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


def test_every_file_of_the_guide_to_new_norms_exists():
    text = (DOCS / "guides/new_norm.md").read_text()
    paths = re.findall(r"`(\w+/[\w/]*(?:\.\w+)?)`", text)
    assert len(paths) > 20
    assert all((DOCS.parent / path).exists() for path in paths)
