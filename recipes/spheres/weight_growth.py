r"""Norms of scale-invariant weights grow in training, and weight decay stops them.

The small run, and the paper's, for a GPU:

    python -m recipes.spheres.weight_growth
    python -m recipes.spheres.weight_growth --dataset=cifar10 --data_dir=<where it is> \
        --model=resnet101 --epochs=200 --batch_size=128 --learning_rate=1e-3 \
        --weight_decays=0,5e-4

Claims:
* Lemma 3: if the loss does not depend on the scale of a kernel W, a step D of gradient
  descent increases |W|^2 by |D|^2, and norms keep growing; with weight decay they
  stabilise or fall (Figure 3, BN, GN, LN and WN; here CBN, WS and CWN as well).
* gamma^2 and beta of a BN approach the variance sigma^2 and the mean mu of its input,
  and their distance stays small (Figure 2).
* The effective weights W' of a BN and the convolution before it (Eq. 12) lie on the
  ellipsoid W' Sigma W'^T = gamma^2 of each unit, with Sigma the covariance of the
  convolution's input. It converges as training does (Section 2.2). Here: how much each
  epoch changes Sigma, gamma and W'.
* Optimisation on the sphere stabilises training (Section 2.5): --sphere also trains
  each norm but CBN without decay and with `keras_norms.ProjectWeights`.

Plain gradient descent at one rate, with and without weight decay. The small run
(ResNet-8 on digits, 14 trainings) takes 3 minutes on two cores of an AMD EPYC. The
growth of |W|^2 over the sum of squared steps is 0.9998 to 1.0012 in all convolutions:
Lemma 3 holds up to rounding and the epsilon of norms, except for CBN (-14.4 to 2.8),
after which not every kernel is scale-invariant. The norm of the first convolution of
the first residual block goes from 5.72 to between 5.77 and 5.87, with decay to between
2.98 and 3.13. Norms grow until the loss is small (at rate 1, by 23 to 40 %). The
distances of Figure 2 are stable without decay, but not small: 0.23 and 0.28. The first
epoch changes Sigma by 11 %, the last one by 0.2; with decay, at this constant rate, by
4.5 until the end. At rate 1 the test accuracy with BN stays above 99 % on the sphere in
the last half, above 98 without it, and falls to 41 with decay.

On 20,000 images of CIFAR-10 (30 epochs, rate 0.1, decay 5e-4, 3 seeds) that norm goes
from 5.64 to between 6.89 and 7.24, and the ratio is 1.0000; with decay the norm goes to
between 5.81 and 6.16. Without decay the distances grow, to 1.12 and 0.52. See
docs/results/weight_growth.md.

Reference: Sun et al., AAAI 2020, Section 3.1. https://doi.org/10.1609/aaai.v34i04.6046
"""

import dataclasses
import itertools

import keras
import numpy as np
from keras import ops

from keras_norms import ProjectWeights, diagnostics
from recipes.engine import classifier, command, training
from recipes.engine.settings import setting
from recipes.spheres import _growth_results

# The first convolution of the first residual block, and the BN after it.
LAYERS = dict.fromkeys(
    ("resnet50", "resnet101"), ("conv2_block1_1_conv", "conv2_block1_1_bn")
)
OTHERS = ("stage1_block0_conv1", "stage1_block0_conv1_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decays(classifier.Grid):
    """Every norm, with and without weight decay."""

    STREAMED = False
    model: str = "resnet8"
    activation: str = "relu"
    batch_size: int | None = 32
    seeds: int = 1
    norms: tuple[str, ...] = ("bn", "group", "layer", "wn", "cbn", "ws+gn", "cwn")
    weight_decays: tuple[float, ...] = (0, 5e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing(classifier.Training):
    """A training, on spheres or not."""

    sphere: bool | None = setting(
        None, "Train each norm but CBN with ProjectWeights, too."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Decays, Growing):
    """Plain gradient descent at one rate."""

    RUN = Growing

    model: str = setting("resnet8", "A residual network.", matches="resnet")
    epochs: int | None = 30
    learning_rate: float = setting(0.1, "Learning rate of all steps.", above=0)
    momentum: float = 0.0  # as in Lemma 3
    optimizer: str | None = setting(None, "None: the lemma is of SGD.", matches="$")

    def runs(self):
        """The settings of all runs, those on the sphere last."""
        runs = super().runs(sphere=None)
        if self.sphere:
            on_sphere = super().runs(weight_decay=0.0, sphere=True)
            runs += [run for run in on_sphere if run.norm != "cbn"]
        return runs

    def outcomes(self):
        """Trains everything; yields norm, decay (`None`: on the sphere), outcomes."""
        found = training.train_all(train, self.runs(), self.workers)
        for norm, decay in itertools.product(self.norms, (*self.weight_decays, None)):
            sphere = True if decay is None else None
            if of := found.of(norm=norm, weight_decay=decay or 0.0, sphere=sphere):
                yield norm, decay, of


def problem(settings):
    """The training of a classifier at one learning rate."""
    rate = [settings.learning_rate]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([], rate)
    return classifier.problem(settings)._replace(schedule=schedule)


def train(settings):
    """Trains one network, and follows its kernels and the BN after the layer shown."""
    callbacks, latest = [lambda *_: _Growth()], {}
    if settings.sphere:
        callbacks.append(lambda *_: ProjectWeights())

    def before(model, problem, settings, epoch):
        latest.update(latest or ellipsoid(model, problem, settings))
        return {}

    def after(model, problem, settings):
        numbers = statistics(model, problem, settings)
        for key, end in ellipsoid(model, problem, settings).items():
            change = np.linalg.norm(end - latest[key]) / np.linalg.norm(latest[key])
            numbers[f"{key}_change"] = float(change)
            latest[key] = end
        return numbers

    hooks = {"callbacks": callbacks, "before": before, "after": after}
    return training.train(settings, "weight_growth", problem, **hooks)


class _Growth(diagnostics.WeightGrowth):
    """Logs |W| of each kernel each epoch, and sums of |W + D|^2 - |W|^2 and |D|^2."""

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self.history = {}

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch)  # nothing reads the logs of a step

    def on_epoch_end(self, epoch, logs=None):
        for key, norms in self.history.items():
            name, _, what = key.rpartition("_")
            if what == "norm":
                growth = np.array(self.history[f"{name}_growth"])
                steps = np.square(self.history[f"{name}_step"])
                logs[f"{name} norm"] = float(np.sqrt(norms[-1] ** 2 + growth[-1]))
                logs[f"{name} growth"] = float(growth.sum())
                logs[f"{name} squared steps"] = float(steps.sum())


def statistics(model, problem, settings):
    """The distances of all channels of the BN, on 128 images, for a line of metrics."""
    if settings.norm != "bn":
        return {}
    _, norm = LAYERS.get(settings.model, OTHERS)
    probe = diagnostics.BatchStatistics(problem.images.x_train[:128], [norm])
    probe.set_model(model)
    probe.on_train_begin()
    probe.measure()
    return {
        key.removeprefix(f"{norm}_"): values.tolist()
        for key, (values,) in probe.channels.items()
    }


def ellipsoid(model, problem, settings):
    """Sigma, gamma and W' of the layer shown with BN, on 128 images: a dict."""
    if settings.norm != "bn":
        return {}
    names, x = LAYERS.get(settings.model, OTHERS), problem.images.x_train[:128]
    layer, norm = map(model.get_layer, names)
    before = keras.Model(model.inputs, layer.input)
    states = before.trainable_variables, before.non_trainable_variables
    states = [[v.value for v in variables] for variables in states]
    read, _ = before.stateless_call(*states, ops.convert_to_tensor(x), training=True)
    patches = ops.image.extract_patches(
        read, layer.kernel_size, layer.strides, padding=layer.padding
    )
    patches = ops.convert_to_numpy(patches).astype("float64")
    patches = patches.reshape(-1, patches.shape[-1])
    return {
        "sigma": np.cov(patches, rowvar=False, bias=True),
        "gamma": training.numpy_copy(norm.gamma),
        "effective": diagnostics.effective_weights(model, x)[norm.name].kernel,
    }


def run(settings):
    """Trains everything; returns the directory with the table and the figures.

    These are growth.png (Figure 3) and, with BN, variance.png and mean.png (Figure 2)
    and ellipsoid.png.
    """
    layer, _ = LAYERS.get(settings.model, OTHERS)
    return _growth_results.write(settings, settings.outcomes(), layer)


if __name__ == "__main__":
    command.run(run, Settings)
