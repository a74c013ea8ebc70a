"""The arguments of diagnostics."""

import inspect

import numpy as np

from keras_norms import diagnostics
from keras_norms.diagnostics import theorems
from tests.support.arguments.kinds import (
    COUNT,
    FUNCTION,
    INF,
    NAN,
    NEVER,
    NOT_NEGATIVE,
    ONLY_NONE,
    POSITIVE,
    SEED,
    SWITCH,
    TEXT,
    VARYING,
    VECTOR,
    Argument,
    choice,
    integer,
    is_array,
    is_pair,
    like_array,
    number,
)
from tests.support.arguments.values import (
    ACTIVATION,
    BATCH,
    BUILT,
    IN_TRAINING,
    INPUTS,
    LAYER,
    LAYERS,
    LOSS,
    MODEL,
    OBJECTIVE,
    OF_MODEL,
    ON_BATCH,
    RATE,
    TARGETS,
    TEXTS,
    WEIGHTS,
    Entry,
    X,
    Y,
)

LINE = {
    "learning_rate": RATE,
    "step_range": Argument(lambda v: is_pair(v) or np.array_equal(v, [1, 2])).refuses(
        (1, 2, 3), (2, 1), (0, 1), (1, INF), "12", [1, None]
    ),
    "points": COUNT,
    "direction": choice("gradient", "random"),
    "seed": SEED,
}
ATTACK = {
    "model": BUILT,
    "x": INPUTS.refuses(X.astype("int32")),
    "y": NEVER.refuses(Y[:0], Y[:5], Y + 0.5, TEXTS, np.zeros((6, 1))),
    "loss": LOSS,
    "epsilon": NOT_NEGATIVE,
    "norm": choice("inf", 2),
    "steps": COUNT,
    "step_size": RATE,
    "bounds": ONLY_NONE.refuses(
        (0, 0.5), (1, 0), "01", (0, "1"), (0, [1, 1]), (0, None)
    ),
    "batch_size": COUNT,
    "verbose": choice("auto", 0, 1, 2),
}
PROBE = {"every": COUNT, "log_dir": TEXT.or_none()}
PAIR = FUNCTION.refuses((X, Y, Y), (X, Y[:3]), [X], (None, Y))
PAIRS = NEVER.refuses([X, X], X, [(X, Y), X], [(X, Y, Y)] * 2, [(None, Y)] * 2)


def of_theorem(function):
    z = np.random.default_rng(1).normal(size=6)
    good = {"g": z, "y": z**2, "gamma": 2.0, "hessian": np.eye(6), "largest": 1.0}
    good |= {"w": z, "optimum": z + 0.1, "x": z}
    of_six = NEVER.refuses(z[:5], np.ones((6, 1)), [*z[:5], NAN], ["a"] * 6)
    kinds = {"g": of_six, "x": of_six, "optimum": of_six, "y": VARYING, "w": VECTOR}
    kinds |= {"gamma": number(), "largest": NOT_NEGATIVE}
    kinds["hessian"] = NEVER.refuses(z, np.eye(5), np.ones((6, 5)), np.eye(6) * NAN)
    names = inspect.signature(function).parameters
    return Entry(function, {n: good[n] for n in names}, {n: kinds[n] for n in names})


DIAGNOSTICS = {
    "bim": Entry(diagnostics.bim, BATCH, ATTACK),
    "robustness": Entry(
        diagnostics.robustness, BATCH, {**ATTACK, "noise": NOT_NEGATIVE, "seed": SEED}
    ),
    "blindness": Entry(
        diagnostics.blindness,
        BATCH,
        {
            **IN_TRAINING,
            "layers": OF_MODEL,
            "source": LAYER.or_none(),
            "labels": ONLY_NONE.refuses(Y[:5], Y + 0.5, TEXTS),
            "deviation": POSITIVE,
            "axis": integer(),
            "seed": SEED,
        },
    ),
    "second_order": Entry(
        diagnostics.second_order,
        {**BATCH, "layer": "hidden"},
        {**IN_TRAINING, "layer": LAYER, "source": LAYER.or_none()},
    ),
    "covariate_shift": Entry(
        diagnostics.covariate_shift,
        BATCH,
        {
            **IN_TRAINING,
            "layers": OF_MODEL,
            "updated": ONLY_NONE.refuses(WEIGHTS[:2], WEIGHTS[::-1], [X, None]),
            "learning_rate": RATE,
        },
    ),
    "gradient_noise": Entry(
        diagnostics.gradient_noise,
        {"model": MODEL, "batches": [(X, Y), (X, Y)]},
        {"model": BUILT, "batches": PAIRS, "loss": LOSS, "training": SWITCH},
    ),
    "landscape": Entry(diagnostics.landscape, BATCH, {**IN_TRAINING, **LINE}),
    "lipschitz_terms": Entry(
        diagnostics.lipschitz_terms,
        {**BATCH, "layer": "norm"},
        {**ON_BATCH, "layer": LAYER.refuses("hidden")},
    ),
    "weight_geometry": Entry(
        diagnostics.weight_geometry,
        BATCH,
        {**IN_TRAINING, "learning_rate": RATE, "tolerance": POSITIVE, "seed": SEED},
    ),
    "hessian_eigenvalues": Entry(
        diagnostics.hessian_eigenvalues,
        BATCH,
        {
            **IN_TRAINING,
            "count": integer(1, OBJECTIVE.start.size - 1).refuses(OBJECTIVE.start.size),
            "which": choice("LA", "SA", "LM"),
            "tolerance": NOT_NEGATIVE,
            "seed": SEED,
        },
    ),
    "hessian_trace": Entry(
        diagnostics.hessian_trace,
        BATCH,
        {**IN_TRAINING, "samples": integer(2), "seed": SEED},
    ),
    "value_and_grad": Entry(
        diagnostics.value_and_grad, BATCH, {**IN_TRAINING, **ACTIVATION}
    ),
    "hessian_vector_product": Entry(
        diagnostics.hessian_vector_product,
        {**BATCH, "vector": WEIGHTS},
        {
            **IN_TRAINING,
            **ACTIVATION,
            "vector": NEVER.refuses(WEIGHTS[:2], WEIGHTS[::-1], [None] * len(WEIGHTS)),
        },
    ),
    "Objective": Entry(diagnostics.Objective, BATCH, {**IN_TRAINING, **ACTIVATION}),
    "Objective.of_batch": Entry(
        OBJECTIVE.of_batch, {"x": X, "y": Y}, {"x": INPUTS, "y": TARGETS}
    ),
    "Objective.value_and_grad": Entry(
        OBJECTIVE.value_and_grad, {}, {"point": ONLY_NONE.refuses(WEIGHTS)}
    ),
    "Objective.hessian_vector_product": Entry(
        OBJECTIVE.hessian_vector_product,
        {"vector": OBJECTIVE.start},
        {"vector": NEVER.refuses(WEIGHTS), "point": ONLY_NONE},
    ),
    "Objective.flatten": Entry(
        OBJECTIVE.flatten, {}, {"values": NEVER.refuses(WEIGHTS[:2], WEIGHTS[::-1])}
    ),
    "Objective.unflatten": Entry(
        OBJECTIVE.unflatten, {}, {"vector": NEVER.refuses(WEIGHTS)}
    ),
    "effective_weights": Entry(
        diagnostics.effective_weights,
        {"model": MODEL, "x": X},
        {"model": BUILT, "x": INPUTS, "training": SWITCH},
    ),
    "decompose": Entry(
        diagnostics.decompose,
        {"v": X},
        {
            "v": Argument(lambda v: like_array(v, 1, 2, 3)),
            "axes": integer(-2, 1).refuses((0, 2), (0, 0), (1, -1), [0.0], "0"),
        },
    ),
    "LandscapeProbe": Entry(
        diagnostics.LandscapeProbe,
        {"batch": (X, Y)},
        {**PROBE, **LINE, "batch": PAIR, "loss": LOSS},
    ),
    "GradientNoiseProbe": Entry(
        diagnostics.GradientNoiseProbe,
        {"batches": [(X, Y), (X, Y)]},
        {**PROBE, "batches": PAIRS.refuses([(X, Y)]), "loss": LOSS},
    ),
    "CovariateShiftProbe": Entry(
        diagnostics.CovariateShiftProbe,
        {"batch": (X, Y)},
        {**PROBE, "batch": PAIR, "layers": LAYERS, "loss": LOSS},
    ),
    "WeightGrowth": Entry(diagnostics.WeightGrowth, {}, {**PROBE, "layers": LAYERS}),
    "BatchStatistics": Entry(
        diagnostics.BatchStatistics,
        {},
        {
            **PROBE,
            "layers": LAYERS,
            "batch": Argument(
                lambda v: v is None or callable(v) or is_array(v, 1, 2, 3)
            ).refuses(X[:0], TEXTS, [X, None]),
        },
    ),
    **{
        f"theorems.{name}": of_theorem(function)
        for name, function in inspect.getmembers(theorems, inspect.isfunction)
        if not name.startswith("_")
    },
}
