"""Blindness of a BN layer inside of trained classifiers.

The small run, on scikit-learn's 8x8 digits, and those of the paper, for a GPU:

    python -m recipes.blindness_classifier
    python -m recipes.blindness_classifier --networks=vgg11 --dataset=cifar10 \
        --data_dir=<where it is> --epochs=100 --hidden=4096 --batches=20
    python -m recipes.blindness_classifier --dataset=mnist --data_dir=<where it is> \
        --networks=alexnet1,alexnet2,alexnet3,lenet1,lenet2,lenet3 --epochs=20 \
        --width=1 --batches=20

Claim (Zhou et al., Tables 2 to 4), x the input and y the output of one BN layer between
Dense layers, in VGG-11 before the second of them from the top, in AlexNet-k and
LeNet-k before the k-th:

* a first-order and a diagonal second-order term added to the loss leave the gradient in
  x alone, an off-diagonal one does not (Table 2, here for every network);
* of the off-diagonal second-order loss of feature d, the part L_linear_d that goes with
  linearly correlated features has no gradient in x_d (Table 3);
* it makes a large part of the gradient in y_d (Table 4).

Networks train in float32 with Adam; BN has epsilon 1e-20, as in the paper. The trained
networks are measured in float32 and, on TensorFlow, in float64.

The small run took 8 minutes on 2 cores of an Intel Xeon that other work shared
(TensorFlow). Batches of mixed labels, float64, in brackets float32:

                   Table 2                             3       4, linear    the paper
              first      diagonal         off-diagonal
    vgg11     4e-13 (2e-4)  4e-13 (3e-4)  4761         –            –           –
    alexnet1  2e-16 (1e-7)  6e-16 (3e-7)   4.8   2e-15 (1e-6)  0.55 ± 0.23  0.84 ± 0.19
    alexnet2  1e-16 (8e-8)  4e-16 (3e-7)   1.8   3e-15 (2e-6)  0.41 ± 0.21  0.73 ± 0.25
    alexnet3  2e-16 (1e-7)  4e-16 (2e-7)   2.9   1e-14 (6e-6)  0.46 ± 0.28  0.85 ± 0.22
    lenet1    1e-16 (7e-8)  2e-16 (2e-7)   3.4   5e-16 (3e-7)  0.36 ± 0.27  0.67 ± 0.29
    lenet2    1e-16 (8e-8)  6e-16 (4e-7)   2.9   4e-15 (3e-6)  0.55 ± 0.21  0.68 ± 0.29
    lenet3    2e-16 (1e-7)  4e-16 (4e-7)   2.9   2e-15 (2e-6)  0.41 ± 0.17  0.77 ± 0.27

Tables 2 and 3 hold up to rounding, which VGG-11 has much of: its loss is small next to
the terms. The linear part of Table 4 is considerable, but not the larger one here.

Reference: Zhou, Shen, Chen, Tang and Zhang, Batch Normalization Is Blind to the First
and Second Derivatives of the Loss, 2022, Tables 2-4 and Appendix I.1.
https://arxiv.org/abs/2205.15146
"""

import pathlib

import keras
import numpy as np
from absl import app, flags
from keras import layers

from keras_norms.diagnostics.blindness import TERMS, blindness, second_order
from recipes import data, experiment, grid
from recipes.models import norms
from recipes.models.alexnet import alexnet
from recipes.models.lenet import lenet
from recipes.models.vgg import vgg
from recipes.precision import available, precision

NETWORKS = ("vgg11", *(f"{n}{k}" for n in ("alexnet", "lenet") for k in (1, 2, 3)))
PAPER = {  # Table 4
    "alexnet1": ("0.84 ± 0.19", "0.47 ± 0.22"),
    "alexnet2": ("0.73 ± 0.25", "0.56 ± 0.29"),
    "alexnet3": ("0.85 ± 0.22", "0.40 ± 0.28"),
    "lenet1": ("0.67 ± 0.29", "0.63 ± 0.27"),
    "lenet2": ("0.68 ± 0.29", "0.61 ± 0.29"),
    "lenet3": ("0.77 ± 0.27", "0.51 ± 0.27"),
}
SECOND = ("linear_at_input", "non_at_input", "linear", "non")
DEFAULTS = {
    "dataset": "digits",
    "train_size": None,
    "epochs": 15,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "hidden": 256,
    "width": 1 / 16,
    "batches": 3,
    "seed": 0,
}


def build(name, image_shape, num_classes, config, run_eagerly=False):
    """A network of `NETWORKS`, compiled, in the precision that Keras is set to."""
    if name not in NETWORKS:
        raise ValueError(
            f"Argument `networks` must be of {', '.join(NETWORKS)}. Received: {name!r}"
        )
    norm = layers.BatchNormalization(epsilon=1e-20, name="norm")
    if name == "vgg11":
        hidden = (config["hidden"],) * 2
        plain = norms.get("none")
        model = vgg(11, image_shape, num_classes, plain, "relu", hidden, norm, place=2)
    elif name.startswith("alexnet"):
        place, width = int(name[-1]), config["width"]
        model = alexnet(image_shape, num_classes, norm, place, width=width)
    else:
        model = lenet(image_shape, num_classes, norm, int(name[-1]))
    model.compile(
        keras.optimizers.Adam(config["learning_rate"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=run_eagerly,
    )
    return model


def train(name, images, config):
    """The trained network and the `History` of its training."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    model = build(name, images.x_train.shape[1:], images.num_classes, config)
    batches = _batches(images, config, config["seed"])
    history = model.fit(
        batches,
        steps_per_epoch=batches.steps,
        epochs=config["epochs"],
        shuffle=False,  # `batches` are
        verbose=0,
    )
    return model, history


def measure(model, images, config):
    """Tables 2 to 4 of a trained network, over some training batches.

    Returns:
        Dict of lists: `first` and the other terms, each a change for mixed batches;
        `<term>, one label`; `shared`, `shared, one label`; and the numbers of
        `SECOND`, of every feature that varies.
    """
    values = {}
    batches = _batches(images, config, config["seed"] + 1)
    for index in range(config["batches"]):
        x, y = batches[index]
        found = blindness(model, x, y, layers=["norm"], seed=index)
        for batch, label in enumerate(found.batches):
            end = "" if label == "mixed" else f", {label}"
            for term, change in zip(TERMS, found.changes[0, batch]):
                values.setdefault(f"{term}{end}", []).append(float(change))
            shared = float(found.shared[0, batch])
            values.setdefault(f"shared{end}", []).append(shared)
        if model.name != "vgg11":  # the others have 20 features, as in the paper
            parts = second_order(model, x, y, layer="norm")
            varies = np.isfinite(parts.linear)
            for key in SECOND:
                numbers = getattr(parts, key)[varies].tolist()
                values.setdefault(key, []).extend(numbers)
    return values


def _batches(images, config, seed):
    return data.Batches(images.x_train, images.y_train, config["batch_size"], seed)


def of_network(name, images, config):
    """Trains a network and measures it in every precision.

    Returns:
        Dict of `network`, `train_accuracy` (last epoch), `train_loss` and, for each
        dtype, a dict of what `measure` returns as mean, deviation and count.
    """
    model, history = train(name, images, config)
    line = {
        "network": name,
        "train_accuracy": float(history.history["accuracy"][-1]),
        "train_loss": float(history.history["loss"][-1]),
    }
    weights = model.get_weights()
    for dtype in available():
        with precision(dtype):
            # To compile would take longer than the gradients.
            model = build(
                name, images.x_train.shape[1:], images.num_classes, config, True
            )
            model.set_weights(weights)
            values = measure(model, images, config)
        line[dtype] = {
            key: {"mean": np.mean(v), "std": np.std(v), "count": len(v)}
            for key, v in values.items()
        }
    return line


def blindness_classifier(
    config, networks=NETWORKS, name=None, runs_dir="runs", data_dir=None, download=False
):
    """Trains and measures networks; goes on with those that are not done.

    Args:
        config: Dict with any of the keys of `DEFAULTS`.
        networks: Names in `NETWORKS`.
        name: Name of the run; one of the data set and the networks where None.
        runs_dir, data_dir, download: As in `recipes.train.train`.

    Returns:
        The path of the directory, with table.md and results.json.
    """
    config = DEFAULTS | {k: v for k, v in config.items() if v is not None}
    config |= {"networks": ",".join(networks), "backend": keras.backend.backend()}
    stem = f"blindness_classifier-{data.stem(config['dataset'])}"
    name = name or f"{stem}-{'+'.join(networks)}-{config['backend']}"
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is None:
        images = data.load(config["dataset"], data_dir, config["train_size"], download)
        done = {line["network"] for line in run.metrics}
        for network in networks:
            if network not in done:
                run.log(**of_network(network, images, config))
        lines = {line["network"]: line for line in run.metrics}
        results = {"networks": [lines[network] for network in networks]}
        grid.write(run.directory, table(results["networks"]), results)
        run.release()
    return run.directory


def table(lines):
    """Returns the results as Markdown: Tables 2, 3 and 4."""
    return "\n".join((_table_2(lines), _tables_3_and_4(lines)))


def _cell(values, key):
    if key not in values:
        return "–"
    mean, std = (
        np.nan if values[key][k] is None else values[key][k] for k in ("mean", "std")
    )
    return f"{mean:.2e} ± {std:.1e}"


def _dtypes(line):
    return [dtype for dtype in ("float32", "float64") if dtype in line]


def _table_2(lines):
    header = ["network", "train accuracy", "precision", "batch", *TERMS, "shared"]
    rows = [
        ["paper, VGG-11", "", "", "mixed", "1.37e-08", "2.72e-08", "1019.49", "", ""]
    ]
    for line in lines:
        for dtype in _dtypes(line):
            for batch, end in (("mixed", ""), ("one label", ", one label")):
                rows.append(
                    [
                        line["network"],
                        f"{line['train_accuracy']:.1%}",
                        dtype,
                        batch,
                        *(
                            _cell(line[dtype], term + end)
                            for term in (*TERMS, "shared")
                        ),
                    ]
                )
    return grid.markdown(header, rows)


def _tables_3_and_4(lines):
    header = ["network", "precision", "norm of dL_linear/dx", "of dL_non/dx"]
    header += ["linear / all", "paper", "non / all", "paper", "features"]
    rows = []
    for line in lines:
        for dtype in _dtypes(line):
            values = line[dtype]
            if "linear" not in values:
                continue
            at_input = [_cell(values, key) for key in SECOND[:2]]
            shares = [
                f"{values[key]['mean']:.2f} ± {values[key]['std']:.2f}"
                for key in SECOND[2:]
            ]
            paper = PAPER.get(line["network"], ("–", "–"))
            pairs = [cell for pair in zip(shares, paper) for cell in pair]
            count = values["linear"]["count"]
            rows.append([line["network"], dtype, *at_input, *pairs, count])
    return grid.markdown(header, rows)


def main(_):
    values = flags.FLAGS.flag_values_dict()
    config = {key: values[key] for key in DEFAULTS}
    places = ("networks", "name", "runs_dir", "data_dir", "download")
    grid.report(blindness_classifier(config, **{key: values[key] for key in places}))


def _define_flags():
    sets = f"digits, {', '.join(data.TFDS)}, or the path of an .npz."
    flags.DEFINE_string("dataset", DEFAULTS["dataset"], sets)
    flags.DEFINE_list("networks", list(NETWORKS), "Some of these.")
    for key, text in (
        ("epochs", "Of training."),
        ("batch_size", "Of training and measuring."),
        ("hidden", "Size of the hidden Dense layers of VGG-11; the paper's has 4096."),
        ("batches", "How many are measured."),
    ):
        flags.DEFINE_integer(key, DEFAULTS[key], text, lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of weights and batches.")
    flags.DEFINE_integer("train_size", None, "Use so many training images only.", 1)
    flags.DEFINE_float("learning_rate", DEFAULTS["learning_rate"], "Of Adam.", 0)
    flags.DEFINE_float("width", DEFAULTS["width"], "Factor of AlexNet's channels.", 0)
    flags.DEFINE_string("name", None, "Of the run.")
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where the run is recorded.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
