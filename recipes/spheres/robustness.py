"""All scale-invariant norms lose accuracy under noise and attack; does decay help?

The small run, one on CIFAR-10 images, and the paper's, for a GPU:

    python -m recipes.robustness
    python -m recipes.robustness --dataset=cifar10 --data_dir=<where it is> \
        --train_size=3000 --batch_size=64 --epochs=12 --noise=0.05 \
        --epsilon=0.0078431373 --epsilon_2=0.25 --test_size=500
    python -m recipes.robustness --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet101 --epochs=200 --batch_size=128 --learning_rate=1e-3 \
        --weight_decay=5e-4 --noise=0.05 --epsilon=0.0078431373 --test_size=10000

Claim (Tables 1 and 2, BN, GN, LN and WN): under Gaussian noise and under the BIM attack
all of them lose accuracy, and with weight decay they lose less of it, for the growing
norm of the weights amplifies the attack. Here CBN, WS and CWN are attacked as well.

The network is one of pixels from 0 to 1; noise and radii are in these units, and the
paper does not give them. After the last epoch the first test images are attacked.

The small run (ResNet-8 on digits, 14 trainings) takes 4.6 minutes of one core of an
Intel Xeon. Clean accuracy, and what noise and BIM (l_inf) take of it, without and with
weight decay; the paper's, for CIFAR-10:

                  without decay          with decay       paper's: without    with
    BN         99.4   3.6   38.1     99.4   3.3   35.8      15.6  43.1     15.6  33.8
    GN         97.8   2.8   33.6     96.9   1.7   27.2       6.3  38.9      9.4  35.6
    LN         97.5   2.2   31.9     97.8   3.3   30.0       2.7  34.6     16.9  43.5
    WN         97.8   4.4   44.4     97.8   2.5   38.6      16.2  36.5     18.8  43.8
    CBN        98.9   5.0   45.0     99.7   4.7   38.6
    WS+GN      97.8   3.1   28.1     98.6   1.9   25.6
    CWN        98.1   4.7   36.7     97.2   5.0   39.2

One run each, 360 test images: the standard error is 2.6 points. Decay helps most norms
here, and in the paper BN and GN; the norm of scale-invariant weights cannot be why, see
docs/results/robustness.md.

Reference: Sun et al., New Interpretations of Normalization Methods in Deep Learning,
AAAI 2020, Section 3.2, Tables 1 and 2. https://doi.org/10.1609/aaai.v34i04.6046
"""

import keras
import numpy as np
from absl import app, flags
from keras import ops

from keras_norms import diagnostics
from recipes import figures, grid
from recipes.models import norms as norm_names
from recipes.weight_growth import NORMS

SETTINGS = {
    "model": "resnet8",
    "activation": "relu",
    "batch_size": 32,
    "learning_rate": 0.05,
}
WEIGHT_DECAY = 5e-3
ATTACK = {"noise": 0.2, "epsilon": 0.1, "epsilon_2": 0.5, "steps": 10}
FACTORS = (0.5, 1, 2)  # of epsilon, for the figure
TEST_SIZE = 1000
SHOWN = ("clean", "noise", "noise_difference", "attacked", "attack_difference")
# Clean, under noise and under BIM without and with decay, ResNet-101 on CIFAR-10.
PAPER = {
    "bn": ((0.9687, 0.8125, 0.5380), (0.9375, 0.7812, 0.6000)),
    "group": ((0.9687, 0.9062, 0.5793), (0.9375, 0.8437, 0.5815)),
    "layer": ((0.8711, 0.8437, 0.5253), (0.9687, 0.8002, 0.5333)),
    "wn": ((0.8679, 0.7060, 0.5031), (0.9062, 0.7187, 0.4687)),
}


class Measurement:
    """Attacks a network when its last epoch ends; the `measure` of `recipes.grid`.

    Args:
        attack: Dict with the keys of `ATTACK`, in units of the range of pixels: the
            standard deviation of the noise, the radii of the balls of both norms, and
            the number of steps.
        test_size: So many test images, the first ones.
    """

    def __init__(self, attack, test_size):
        self.attack = attack
        self.test_size = test_size

    def __call__(self, model, images, config):
        steps = len(images.x_train) // config["batch_size"] * config["epochs"]
        if int(ops.convert_to_numpy(model.optimizer.iterations)) < steps:
            return {}
        epsilon = self.attack["epsilon"]
        network, x, y = pixels(model, images, self.test_size)

        def attacked(norm, epsilon):
            return diagnostics.robustness(
                network,
                x,
                y,
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                noise=self.attack["noise"],
                epsilon=epsilon,
                norm=norm,
                steps=self.attack["steps"],
                seed=config["seed"],
                verbose=0,
            )._asdict()

        kernels = [v for v in model.trainable_variables if len(v.shape) == 4]
        return {
            "inf": [attacked("inf", factor * epsilon) for factor in FACTORS],
            "2": attacked(2, self.attack["epsilon_2"]),
            "weight_norm": float(
                np.sqrt(sum(np.square(ops.convert_to_numpy(v)).sum() for v in kernels))
            ),
        }


def pixels(model, images, test_size=None):
    """A network as one of pixels between 0 and 1, and test images in these.

    Args:
        model: A network of standardised images.
        images: The `ImageData`. The images must attain both ends of the range.
        test_size: Number of test images, all if `None`.

    Returns:
        A `keras.Model` that shares the weights, images and labels.
    """
    low, high = (
        reduce([part(x, (0, 1, 2)) for x in (images.x_train, images.x_test)], 0)
        for part, reduce in ((np.min, np.min), (np.max, np.max))
    )
    span = np.maximum(high - low, 1e-7)
    inputs = keras.Input(images.x_train.shape[1:])
    standard = keras.layers.Rescaling(span.tolist(), low.tolist())(inputs)
    x = np.clip((images.x_test[:test_size] - low) / span, 0, 1)
    network = keras.Model(inputs, model(standard))
    return network, x.astype("float32"), images.y_test[:test_size]


def robustness(
    settings,
    norms=NORMS,
    weight_decay=WEIGHT_DECAY,
    attack=ATTACK,
    test_size=TEST_SIZE,
    seeds=1,
    runs_dir="runs",
    **places,
):
    """Trains with every norm, with and without weight decay, and attacks.

    Args:
        settings: Dict of the settings of `recipes.train.train` that all runs share, in
            place of those in `SETTINGS`.
        norms: List of names of `recipes.models.norms`.
        weight_decay: Positive float.
        attack: Dict with any of the keys of `ATTACK`, see `Measurement`.
        test_size: See `Measurement`.
        seeds: Integer, each is trained with the seeds 0 to `seeds - 1`.
        runs_dir: Where the runs, and the outcome, are recorded.
        **places: Other arguments of `recipes.grid.train_all`.

    Returns:
        The path of the directory with table.md, results.json and epsilon.png.
    """
    attack = ATTACK | attack
    numbers = {**attack, "weight_decay": weight_decay}
    for key, value in numbers.items():
        if not value > 0:
            raise ValueError(
                f"Argument `{key}` must be positive. Received: {key}={value}"
            )
    settings = SETTINGS | settings
    cells = [(norm, decay) for norm in norms for decay in (0.0, weight_decay)]
    named = "-".join(f"{key}{value:g}" for key, value in attack.items())
    outcomes = grid.train_all(
        [
            {**settings, "norm": norm, "weight_decay": decay, "seed": seed}
            for norm, decay in cells
            for seed in range(seeds)
        ],
        kind=f"robustness-{named}-{test_size}images",
        measure=Measurement(attack, test_size),
        runs_dir=runs_dir,
        **places,
    )
    rows, panels = [], {}
    for i, (norm, decay) in enumerate(cells):
        # The line of a run that diverged has no measurement.
        lines = [
            curve[-1]
            for _, curve in outcomes[i * seeds : (i + 1) * seeds]
            if "inf" in curve[-1]
        ]
        rows.append(
            {
                "norm": norm,
                "weight_decay": decay,
                "diverged": seeds - len(lines),
                **summary(lines),
                "runs": lines,
            }
        )
        label = "decay" if decay else "no decay"
        panels.setdefault(label, {})[norm] = {
            factor * attack["epsilon"]: [
                100 * line["inf"][place]["attacked"] for line in lines
            ]
            for place, factor in enumerate(FACTORS)
        }
    lists = [norms, [f"decay{weight_decay:g}"], [f"seeds{seeds}"]]
    kind = f"robustness-{named}-{test_size}images"
    directory = grid.directory(kind, runs_dir, settings, *lists)
    grid.write(directory, table(rows, attack), {"attack": attack, "rows": rows})
    figures.against(
        directory / "epsilon.png",
        panels,
        "epsilon, of the range of pixels",
        "accuracy under BIM, l∞ (%)",
        grid.about(settings, seeds),
        base=2,
    )
    return directory


def summary(lines):
    """Mean and deviation over seeds: `inf` and `2`, dicts of numbers, `weight_norm`."""
    if not lines:
        return {"inf": None, "2": None, "weight_norm": None}
    inf = FACTORS.index(1)
    chosen = {"inf": [line["inf"][inf] for line in lines]}
    chosen["2"] = [line["2"] for line in lines]
    return {
        **{
            norm: {key: _spread([m[key] for m in found]) for key in found[0]}
            for norm, found in chosen.items()
        },
        "weight_norm": _spread([line["weight_norm"] for line in lines]),
    }


def _spread(values):
    return {"mean": float(np.mean(values)), "std": float(np.std(values))}


def table(rows, attack):
    """Returns the rows of `robustness` as Markdown."""
    header = ["norm", "weight decay", "clean", "noise", "difference", "BIM l∞"]
    header += ["difference", "paper: clean", "noise", "BIM l∞", "BIM l2", "norm"]
    lines = []
    for row in rows:
        name = figures.NAME_OF.get(row["norm"], row["norm"].upper())
        if row["diverged"]:
            name += f" ({row['diverged']} diverged)"
        paper = PAPER.get(row["norm"], (("–",) * 3,) * 2)[row["weight_decay"] > 0]
        cells = [name, f"{row['weight_decay']:g}"]
        if row["inf"] is None:
            lines.append([*cells, *["–"] * 5, *paper, *["–"] * 2])
            continue
        cells += [grid.spread(row["inf"][key], 3) for key in SHOWN]
        cells += [*paper, grid.spread(row["2"]["attacked"], 3)]
        lines.append([*cells, grid.spread(row["weight_norm"], 1)])
    return (
        f"{grid.markdown(header, lines)}\n"
        "Accuracy on test images, mean ± standard deviation over seeds; the paper's is "
        "that of ResNet-101 on CIFAR-10 (Table 1). In units of the range of pixels: "
        f"noise of deviation {attack['noise']:g}; BIM with epsilon "
        f"{attack['epsilon']:g} (l∞) and {attack['epsilon_2']:g} (l2), "
        f"{attack['steps']} steps. The last column is that of all convolutions' "
        "kernels together.\n"
    )


def main(_):
    values = flags.FLAGS.flag_values_dict()
    arguments = grid.arguments_of_flags()
    arguments.pop("activations")
    rate = values["learning_rate"]
    arguments["settings"] |= {} if rate is None else {"learning_rate": rate}
    grid.report(
        robustness(
            norms=values["norms"],
            weight_decay=values["weight_decay"],
            attack={key: values[key] for key in ATTACK},
            test_size=values["test_size"],
            **arguments,
        )
    )


def define_flags():
    """Defines the flags."""
    grid.define_flags(SETTINGS["model"], seeds=1, activations=())
    flags.DEFINE_list("norms", list(NORMS), ", ".join(sorted(norm_names.NORMS)))
    flags.DEFINE_float("weight_decay", WEIGHT_DECAY, "Of the runs with it.", 0)
    flags.DEFINE_float("learning_rate", None, "Of epoch 1; 0.05.", lower_bound=0)
    for key, text in (
        ("noise", "Deviation of the noise."),
        ("epsilon", "Radius of the l_inf ball."),
        ("epsilon_2", "Radius of the l_2 ball."),
    ):
        flags.DEFINE_float(key, ATTACK[key], f"{text} Of the range of pixels.", 0)
    flags.DEFINE_integer("steps", ATTACK["steps"], "Of the attack.", lower_bound=1)
    flags.DEFINE_integer("test_size", TEST_SIZE, "Test images attacked.", 1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
