"""Rebuilds a layer from its configuration, with the functions that it had.

A configuration names functions. A name may mean nothing, as that of a closure, or
something else, as that of a custom function called `relu`. Here the configuration holds
the functions themselves.
"""

import inspect
import itertools
import warnings

import keras
from keras import tree

from keras_norms import _keras
from keras_norms.activations import relu, relu6
from keras_norms.layers.learning_rate import FollowsLearningRate


class _Kept:
    """Stands for a function or an object while `get_config` is called."""

    def __init__(self, value, number):
        self.value, self.number = value, number

    def __call__(self, *args, **kwargs):
        return self.value(*args, **kwargs)

    def get_config(self):
        return {"number": self.number}

    @classmethod
    def from_config(cls, config):
        return config["value"]


def config_of(thing):
    """The configuration of a layer, optimizer or metric, for `from_config` alone.

    Functions, and objects whose classes are not those of Keras, are in it as they are.
    """
    kept = _functions(thing)
    try:
        for number, (part, name, value) in enumerate(kept):
            # Past Keras, which would look for weights in the attribute.
            object.__setattr__(part, name, _Kept(value, number))
        config = thing.get_config()
    finally:
        for part, name, value in kept:
            object.__setattr__(part, name, value)
    plain, own = keras.layers.Layer.from_config.__func__, _own_classes(thing)

    def fill(entry, is_taken=False):
        """Put functions in; as they are where a constructor takes them."""
        if isinstance(entry, _Kept):
            return entry.value
        if isinstance(entry, dict):
            if entry.get("class_name") == _Kept.__name__:
                value = kept[entry["config"]["number"]][-1]
                return value if is_taken else {**entry, "config": {"value": value}}
            if "class_name" in entry:
                cls = own.get(entry["class_name"])
                is_taken = cls is not None and cls.from_config.__func__ is plain
            return {name: fill(each, is_taken) for name, each in entry.items()}
        if type(entry) in (list, tuple):
            return type(entry)(fill(each) for each in entry)
        return entry

    return fill(config)


def from_config(cls, config, source=None):
    """`cls.from_config` of what `config_of` gives of `source`, with its classes."""
    own = {} if source is None else _own_classes(source)
    own[_Kept.__name__] = _Kept
    untaken = _untaken(cls, config)
    config = {name: value for name, value in config.items() if name not in untaken}
    with _keras.unsafe_deserialization(), keras.saving.custom_object_scope(own):
        new = cls.from_config(config)
    for name, value in untaken.items():
        setattr(new, name if name != "dtype" else "dtype_policy", value)
    return new


def _untaken(cls, config):
    """Arguments that all layers have, but a custom constructor does not take."""
    if is_of(cls, "keras") or not issubclass(cls, keras.layers.Layer):
        return {}
    taken = inspect.signature(cls.__init__).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return {}
    names = {"name", "trainable", "dtype"} & config.keys() - taken.keys()
    return {name: config[name] for name in names}


def pairs_of_variables(new, old):
    """Pair the variables of a rebuilt layer with those of the old one.

    `None` stands for a variable that the old one does not have, such as a new bias.

    Raises:
        ValueError: If layers inside it have other variables than their configuration
            makes.
    """
    ours, theirs = _variables(new), _variables(old)
    if _shapes(ours) == _shapes(theirs):
        return [*zip(ours, theirs)]  # By place: names may be counted up.
    by_name = {v.name: v for v in _own(old)}
    found = [(v, by_name.get(v.name)) for v in _own(new)]
    inside = [_keras.layers_of(each, include_self=False) for each in (new, old)]
    for one, other in itertools.zip_longest(*inside):
        ours, theirs = ([] if each is None else _own(each) for each in (one, other))
        if _shapes(ours) != _shapes(theirs):
            names = [[v.name for v in each] for each in (theirs, ours)]
            raise ValueError(
                f"Layer '{old.name}' could not be rebuilt from its configuration: "
                f"'{(other or one).name}' in it has the weights {names[0]}, and would "
                f"have {names[1]}. Enable LoRA, or quantize, afterwards."
            )
        found += zip(ours, theirs)
    return found


def _shapes(variables):
    return [tuple(v.shape) for v in variables]


def _variables(layer):
    """All but the counters that AMAT adds, which are the optimizer's."""
    followers = _keras.layers_of(layer, FollowsLearningRate)
    counters = {id(follower.step) for follower in followers}
    return [v for v in layer.variables if id(v) not in counters]


def _own(layer):
    """The variables of a layer without those of the layers in it."""
    inside = _keras.layers_of(layer, include_self=False)
    inner = {id(v) for each in inside for v in each.variables}
    return [v for v in _variables(layer) if id(v) not in inner]


def warn_of_what_is_left_out(old, new, stacklevel=5):
    """Warn if a rebuilt layer or model differs: its configuration is incomplete."""
    if is_of(type(old), "keras", "keras_norms"):
        return
    # Those of all layers are among them. Without a name, Keras would count it.
    of_all_models = vars(keras.Sequential(name="any"))
    found = [
        f"{name}={value!r} (now {vars(new)[name]!r})"
        for name, value in vars(old).items()
        if isinstance(value, (bool, int, float, str))
        and name not in of_all_models
        and vars(new).get(name, value) != value
    ]
    if found:
        warnings.warn(
            f"Layer '{old.name}' may compute something else in the new model: "
            f"{type(old).__name__}.get_config() leaves out " + ", ".join(found),
            stacklevel=stacklevel,
        )


def warn_of_lost_methods(old, new):
    """Warn if the new model does not train, or predict, as the old one's class says."""
    names = "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"
    before, now = type(old), type(new)
    lost = [
        name
        for name in names  # NumPy's models have no `train_step`
        if getattr(before, name, None) is not getattr(now, name, None)
    ]
    if lost:
        warnings.warn(
            f"Model '{old.name}' is of class {before.__name__}; the new one is a "
            f"{now.__name__} without its methods {lost}",
            stacklevel=4,
        )


def warn_of_what_is_shared(operations, model):
    """Warn of functions that refer to layers or weights of a model: copies do too."""
    own = {id(each): each for each in (*_keras.layers_of(model), *model.variables)}
    found = {
        f"{own[id(each)].name} (in {operation.name})"
        for operation in operations
        for _, _, function in _functions(operation)
        for each in _seen_by(getattr(function, "func", function))
        if id(each) in own
    }
    if found:
        warnings.warn(
            "Some functions of the model use layers or weights directly. The new model "
            f"shares these with the old one: {sorted(found)}",
            stacklevel=4,
        )


def _seen_by(function):
    if not inspect.isfunction(function):
        return [getattr(function, "__self__", None)]
    names = inspect.getclosurevars(function)
    return [*names.nonlocals.values(), *names.globals.values()]


def copied(operation, name):
    """A copy that shares all but name and calls: for a layer without variables."""
    new = object.__new__(type(operation))
    vars(new).update(vars(operation))
    object.__setattr__(new, "name", name)
    _keras.forget_calls(new)
    return new


def is_copied(operation):
    """Whether it has no variables, and its configuration may not be all of it."""
    if not isinstance(operation, keras.layers.Layer) or operation.variables:
        return False
    return not is_of(type(operation), "keras") or any(
        name for part, name, _ in _functions(operation) if part is operation
    )


def compile_as(old, new):
    """Compile with the same optimizer, loss and metrics, functions as they are.

    Slots are not carried over. It warns if something cannot be rebuilt.
    """
    if not getattr(old, "compiled", False):
        return
    try:
        if type(old).compile is not keras.Model.compile:
            new.compile_from_config(old.get_compile_config())
            return
        settings = tree.map_structure(_made_again, _keras.compile_settings(old))
        new.compile(**settings)
        if new.optimizer is not None:
            _keras.exclude_from_weight_decay_as(old, new)
            new.optimizer.build(new.trainable_variables)
    except Exception as e:
        warnings.warn(
            f"The new model '{new.name}' is not compiled: the optimizer, loss or "
            f"metrics of the old one could not be rebuilt: {e}",
            stacklevel=4,
        )


def is_compiled_by_names(model):
    """Whether a loss or metrics were given by the names of outputs."""
    settings = _keras.compile_settings(model) if model.compiled else {}
    return any(isinstance(setting, dict) for setting in settings.values())


def _made_again(setting):
    """A rebuilt optimizer or metric; a loss has no state."""
    if isinstance(setting, (keras.optimizers.Optimizer, keras.metrics.Metric)):
        return from_config(type(setting), config_of(setting))
    return setting


def _parts(thing):
    """A layer with those inside it, or the object alone."""
    if isinstance(thing, keras.layers.Layer):
        return _keras.layers_of(thing)
    return [thing]


def _own_classes(thing):
    """Those in it that Keras does not know, by their names."""
    own = [type(part) for part in _parts(thing) if not is_of(type(part), "keras")]
    return {cls.__name__: cls for cls in own}


def _functions(thing):
    """Functions that a name may not find again: (owner, attribute, value)."""
    return [
        (part, name, value)
        for part in _parts(thing)
        for name, value in vars(part).items()
        if _is_kept(value) and not hasattr(type(part), name)
    ]


def _is_kept(value):
    if not callable(value) or isinstance(value, (type, keras.layers.Layer)):
        return False
    if hasattr(value, "get_config"):
        return not is_of(type(value), "keras")
    # Keras finds these by their names.
    name = getattr(value, "__name__", "")
    found_by_name = getattr(keras.activations, name, None), relu, relu6
    return all(value is not each for each in found_by_name)


def is_of(cls, *packages):
    """Whether a class is defined in one of these packages."""
    return cls.__module__.partition(".")[0] in packages
