"""Trains one network with one normalisation, as Section 6.1 of the CBN paper does.

The small run, on scikit-learn's 8x8 digits, takes half a minute on 2 cores (with 15
epochs, the default, less), and the paper's run needs a GPU:

    python -m recipes.train --dataset=digits --model=resnet20 --norm=cbn \
        --activation=sigmoid --rho=1 --omega=10 --epochs=30 --seed=0
    python -m recipes.train --dataset=cifar10 --data_dir=<where it is> --norm=cbn

ImageNet, with the paper's settings for it; `recipes.imagenet` says where it comes from:

    python -m recipes.train --dataset=imagenet2012 --data_dir=<where it is> \
        --model=resnet50 --norm=cbn --activation=relu --dtype=mixed_bfloat16

With sigmoid and seed 0, the small run passes 90 % test accuracy in epoch 2 and ends at
98.9 %; with `--norm=bn`, in epoch 7 and at 98.6 %. The paper's table has 120 epochs of
CIFAR-10, ten seeds, and a rho for each activation (`recipes.compare` has the mean of
several seeds).

The same command goes on where it was interrupted, with the same batches: on one
machine with the same number of threads, the outcome is that of an uninterrupted run.

Reference: Peng, Yu and Yu, Re-Thinking the Effectiveness of Batch Normalization and
Beyond, TPAMI 2023, Section 6.1. https://doi.org/10.1109/TPAMI.2023.3319005
"""

import contextlib
import pathlib

import keras
import numpy as np
from absl import app, flags

from keras_norms import AMAT
from recipes import data, experiment, files, imagenet, models, optimizers, strategies
from recipes.models import norms
from recipes.settings import DEFAULTS, DTYPES, complete, rho, run_name

TEST_BATCH_SIZE = data.TEST_BATCH_SIZE


def train(
    config,
    name=None,
    runs_dir="runs",
    saved_models_dir="saved_models",
    data_dir=None,
    download=False,
    verbose="auto",
    until=None,
    strategy=None,
):
    """Trains a network, or goes on with that, or returns what came out before.

    Args:
        config: Dict with any of the keys of `DEFAULTS`, in `recipes.settings`; the
            others have that value.
        name: Name of the run; `run_name(config)` where None.
        runs_dir: The run is recorded in `<runs_dir>/<name>/`.
        saved_models_dir: The network as it was after the epoch of the highest test
            accuracy goes to `<saved_models_dir>/<name>.keras`, or nowhere if `None`.
        data_dir, download: Arguments of `recipes.data.source`.
        verbose: As in `keras.Model.fit`.
        until: Integer, stop after this epoch of the whole training; the same call with
            a later one goes on. The results are then those so far.
        strategy: `None`, or what `recipes.strategies.get` returns for many devices.

    Returns:
        Dict with the name of the run, its last epoch (`epochs`, and if the loss became
        NaN there, `diverged`), train and test loss and accuracy in that epoch, the
        highest test accuracy and its epoch, the median seconds of a training step, and
        the path of the saved model. A loss is the mean cross-entropy in nats. What
        there is not is None: a loss that is NaN, the best of no epoch.
    """
    config = complete(config)
    name = name or run_name(config)
    if strategy is not None:
        runs_dir, saved_models_dir = strategy.places(name, runs_dir, saved_models_dir)
    run = experiment.Run(pathlib.Path(runs_dir) / name, config)
    if run.results is not None:
        return run.results
    places = saved_models_dir, data_dir, download
    with run:
        return _train(run, name, *places, verbose, until, strategy)


def _train(run, name, saved_models_dir, data_dir, download, verbose, until, strategy):
    config = run.config
    keras.backend.clear_session()
    keras.utils.set_random_seed(config["seed"])
    source = data.source(config, data_dir, download)
    if strategy is not None:
        source = strategy.distribute(source, config)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = _compiled(config, source, strategy)
        recorder = experiment.Recorder(run, model)
    last = min(until or config["epochs"], config["epochs"])
    if recorder.epoch < last:
        amat = norms.get(config["norm"]).amat
        model.fit(
            source.batches(recorder.epoch),
            steps_per_epoch=source.steps,
            epochs=last,
            initial_epoch=recorder.epoch,
            shuffle=False,  # the batches are
            validation_data=source.test,
            validation_batch_size=TEST_BATCH_SIZE,
            callbacks=[AMAT(), recorder] if amat else [recorder],
            verbose=verbose,
        )
    if recorder.epoch < config["epochs"] and not recorder.diverged:
        return results(run, name)

    if recorder.best is not None:
        for variable in model.variables:
            variable.assign(recorder.best[variable.path])
    best = model if recorder.best is not None else None
    return finish(run, name, best, saved_models_dir)


def _compiled(config, source, strategy):
    norm = norms.get(config["norm"], rho(config), config["omega"])
    model = models.build(
        config["model"],
        source.image_shape,
        source.num_classes,
        norm if strategy is None else strategy.norm(norm),
        config["activation"],
        dtype=config["dtype"],
    )
    norms.check_stages(config["stage_rho"], model)
    model.compile(
        optimizers.SGD(
            schedule(config, source.steps), config["momentum"], config["weight_decay"]
        ),
        # With a strategy, test batches have images of weight 0.
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=["accuracy"],
    )
    return model


def schedule(config, steps):
    """The learning rate of a run, with `steps` steps an epoch, as the paper has it."""
    make = optimizers.piecewise_schedule
    if config["dataset"] in data.STREAMED:
        make = imagenet.schedule
    return make(config["learning_rate"], steps * config["epochs"])


def finish(run, name, best_model, saved_models_dir, **more):
    """Saves the best network of a run, and declares the run complete.

    Args:
        run: An `experiment.Run`, with a line of metrics for each epoch.
        name, saved_models_dir: See `train`.
        best_model: The `keras.Model` with its best weights, `None` if there are none.
        **more: Other results.

    Returns:
        The results, see `train`.
    """
    saved_model = None
    if best_model is not None and saved_models_dir is not None:
        saved_model = pathlib.Path(saved_models_dir) / f"{name}.keras"
        files.sweep(saved_model)
        # A new model has no optimizer, so that reading it needs keras_norms only.
        bare = keras.Model(best_model.inputs, best_model.outputs, name=best_model.name)
        experiment.write(saved_model, bare.save)
    run.finish(results(run, name, saved_model=saved_model and str(saved_model), **more))
    return run.results


def results(run, name, saved_model=None, **more):
    """What came out of a run, see `train`."""
    metrics = run.metrics
    finite = [line for line in metrics if line["train_loss"] is not None]
    best = max(finite, key=lambda line: line["test_accuracy"], default={})
    seconds = [line["seconds_per_step"] for line in metrics]
    seconds = [value for value in seconds if value is not None]
    scores = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    return {
        "name": name,
        "epochs": len(metrics),
        "diverged": metrics[-1]["train_loss"] is None,
        **{key: metrics[-1][key] for key in scores},
        "best_test_accuracy": best.get("test_accuracy"),
        "best_epoch": best.get("epoch"),
        "seconds_per_step": float(np.median(seconds)) if seconds else None,
        "saved_model": saved_model,
        **more,
    }


def define_shared_flags():
    """Defines the flags that train.py and compare.py have in common."""
    flags.DEFINE_string(
        "dataset",
        DEFAULTS["dataset"],
        f"digits, {', '.join(data.TFDS + data.STREAMED)}, or the path of an .npz file.",
    )
    flags.DEFINE_float("rho", DEFAULTS["rho"], "CBN's rho.", lower_bound=0)
    flags.DEFINE_float("omega", DEFAULTS["omega"], "CBN's omega.", lower_bound=0)
    flags.DEFINE_integer(
        "epochs", None, "120; for digits 15, for mnist 10.", lower_bound=1
    )
    flags.DEFINE_integer(
        "batch_size", None, "128; for imagenet2012 256.", lower_bound=1
    )
    flags.DEFINE_float("learning_rate", DEFAULTS["learning_rate"], "Of epoch 1.")
    flags.DEFINE_float("momentum", DEFAULTS["momentum"], "", 0, 1)
    flags.DEFINE_float(
        "weight_decay", None, "Times weights; 5e-4, for imagenet2012 1e-4.", 0
    )
    flags.DEFINE_integer(
        "train_size", None, "Use so many training images only.", lower_bound=1
    )
    flags.DEFINE_bool(
        "augment", None, "Crop and mirror training images; CIFAR's, ImageNet's if None."
    )
    flags.DEFINE_integer(
        "image_size", None, "Pixels, of imagenet2012; 224.", lower_bound=1
    )
    flags.DEFINE_enum("dtype", None, DTYPES, "Dtype policy; Keras' own if None.")
    flags.DEFINE_string("data_dir", None, "Where tensorflow_datasets looks.")
    flags.DEFINE_bool("download", False, "Download the data set if it is not there.")
    flags.DEFINE_string("runs_dir", "runs", "Where runs are recorded.")
    flags.DEFINE_string("saved_models_dir", "saved_models", "Where models are saved.")


def main(_):
    values = flags.FLAGS.flag_values_dict()
    config = {key: values[key] for key in DEFAULTS}
    places = ("name", "runs_dir", "saved_models_dir", "data_dir", "download")
    results = train(
        config,
        strategy=strategies.from_flags(),
        **{key: values[key] for key in places},
    )
    print(f"{results['name']} is complete:")
    for key, value in results.items():
        print(f"  {key}: {value}")


if __name__ == "__main__":
    define_shared_flags()
    flags.DEFINE_string("model", DEFAULTS["model"], models.NAMES)
    flags.DEFINE_enum("norm", DEFAULTS["norm"], sorted(norms.NORMS), "")
    flags.DEFINE_string("activation", DEFAULTS["activation"], "As Keras calls it.")
    flags.DEFINE_integer("seed", DEFAULTS["seed"], "Of weights, order, augmentation.")
    flags.DEFINE_string("stage_rho", None, "CBN's rho of stages: stage1=0.5,stage2=2.")
    flags.DEFINE_integer(
        "validation_size",
        None,
        "Test on so many held-out training images.",
        lower_bound=1,
    )
    flags.DEFINE_string("name", None, "Name of the run, made of the settings if None.")
    strategies.define_flags()
    app.run(main)
