"""Functions that measure a model on a batch, and do not change it."""

from keras_norms.diagnostics import theorems
from keras_norms.diagnostics._engine.objective import Objective
from keras_norms.diagnostics.blindness import Blindness, blindness
from keras_norms.diagnostics.covariate_shift import (
    CovariateShift,
    CovariateShiftProbe,
    covariate_shift,
)
from keras_norms.diagnostics.geometry import (
    Decomposition,
    EffectiveWeight,
    WeightGeometry,
    decompose,
    effective_weights,
    weight_geometry,
)
from keras_norms.diagnostics.gradient_noise import (
    GradientNoise,
    GradientNoiseProbe,
    gradient_noise,
)
from keras_norms.diagnostics.gradients import (
    LossAndGradient,
    Trace,
    hessian_eigenvalues,
    hessian_trace,
    hessian_vector_product,
    value_and_grad,
)
from keras_norms.diagnostics.landscape import Landscape, LandscapeProbe, landscape
from keras_norms.diagnostics.lipschitz import LipschitzTerms, lipschitz_terms
from keras_norms.diagnostics.robustness import Robustness, bim, robustness
from keras_norms.diagnostics.second_order import SecondOrder, second_order
from keras_norms.diagnostics.weight_growth import BatchStatistics, WeightGrowth

__all__ = [
    "BatchStatistics",
    "Blindness",
    "CovariateShift",
    "CovariateShiftProbe",
    "Decomposition",
    "EffectiveWeight",
    "GradientNoise",
    "GradientNoiseProbe",
    "Landscape",
    "LandscapeProbe",
    "LipschitzTerms",
    "LossAndGradient",
    "Objective",
    "Robustness",
    "SecondOrder",
    "Trace",
    "WeightGeometry",
    "WeightGrowth",
    "bim",
    "blindness",
    "covariate_shift",
    "decompose",
    "effective_weights",
    "gradient_noise",
    "hessian_eigenvalues",
    "hessian_trace",
    "hessian_vector_product",
    "landscape",
    "lipschitz_terms",
    "robustness",
    "second_order",
    "theorems",
    "value_and_grad",
    "weight_geometry",
]
