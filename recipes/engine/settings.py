"""Settings: frozen dataclasses, from which flags, names, checks and JSON are made.

A setting is described once, in the class that it belongs to:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Training(Settings):
        NAMED = ("dataset",)
        dataset: str = setting("digits", "Name of the data set.")
        epochs: int | None = setting(None, "120; of digits 15.", at_least=1)

A class that changes a default repeats only the name: `epochs: int = 30`. Settings with
`compare=False`, such as places of files, do not affect the outcome: they are neither in
the name nor in the JSON of a run. `None` becomes what `usual` says.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import operator
import pathlib
import re
import types
import typing
from dataclasses import Field
from typing import ClassVar

import keras
from absl import flags

from recipes.engine import data

flags.disclaim_key_flags()  # --help of a recipe shows them as its own

SEED = {"at_least": 0, "at_most": 2**32 - 1}  # what NumPy takes


def setting(default, help, *, compare=True, **checks):
    """A field of a `Settings` class.

    Args:
        default: Its value; `None` if that depends on other settings.
        help: Text of the flag.
        compare: Whether it affects the outcome.
        **checks: `choices`, the allowed values; `matches`, a pattern for what `help`
            describes; `directory`, whether files are refused; or bounds of a number:
            `above`, `at_least` and `at_most`.
    """
    metadata = {"help": help, **checks}
    return dataclasses.field(default=default, metadata=metadata, compare=compare)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings.

    Raises:
        ValueError: If a setting cannot have its value.
    """

    NAMED: ClassVar = ()  # the settings in the name of every run
    VARIABLE: ClassVar = ()  # what does not change the compiled network

    runs_dir: str = setting(
        "runs",
        "Directory of runs. An interrupted one continues.",
        compare=False,
        directory=True,
    )
    backend: str | None = None  # of Keras; no flag

    def __init_subclass__(cls):
        """A default alone inherits everything else from the class above."""
        above = {}
        for base in reversed(cls.__mro__[1:]):
            above |= vars(base).get("__dataclass_fields__", {})
        for name in above.keys() & vars(cls).keys():
            about, value = above[name].metadata, vars(cls)[name]
            if about and not getattr(value, "metadata", None):
                compare = above[name].compare
                field = setting(_default(value), compare=compare, **about)
                setattr(cls, name, field)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _converted(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        usual = {"backend": keras.backend.backend()} | self.usual()
        for name, value in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))

    def usual(self):
        """A dict of the values that replace `None`."""
        return {}

    def config(self):
        """What affects the outcome, in a form JSON can hold."""
        names = [field.name for field in dataclasses.fields(self) if field.compare]
        values = [getattr(self, name) for name in names]
        values = [list(v) if isinstance(v, tuple) else v for v in values]
        return dict(zip(names, values, strict=True))

    def label(self):
        """The values of `NAMED`, then every other setting that is not the default."""
        named = [name for name in self.NAMED if not _is_swept(type(self), name)]
        own = {name: getattr(self, name) for name in named}
        usual = type(self)(**own).config() | {"backend": "tensorflow"}
        parts = [_text(key, value) for key, value in own.items() if value is not None]
        parts += [
            f"{key}{_shown(value)}"
            for key, value in sorted(self.config().items())
            if key not in named and value != usual[key]
        ]
        return "-".join(parts)

    def directory(self, recipe="", name=None):
        """The directory of a recipe or run: called `name`, or after its settings."""
        if name:
            return pathlib.Path(self.runs_dir, name)
        name = "-".join(filter(None, [recipe, self.label()]))
        if len(name) > 200:  # file systems take 255
            digest = hashlib.sha256(name.encode()).hexdigest()
            name = f"{name[:190]}-{digest[:9]}"
        return pathlib.Path(self.runs_dir, name)

    def program(self):
        """What is equal in all runs that share one compiled network."""
        fixed = [name for name in self.config() if name not in self.VARIABLE]
        return type(self).__qualname__, *((name, getattr(self, name)) for name in fixed)

    @classmethod
    def define_flags(cls, flag_values=flags.FLAGS):
        """Defines a flag for each setting that is not swept."""
        for field in _flags(cls):
            kind, default = _kind(field)[0], field.default
            if isinstance(default, tuple):
                default = [_shown(value) for value in default]
            about, choices = (field.metadata.get(key) for key in ("help", "choices"))
            if choices and kind is tuple:
                about = f"{about} Of {', '.join(choices)}."
            shared = {"default": default, "help": about, "flag_values": flag_values}
            if choices and kind is str:
                flags.DEFINE_enum(field.name, enum_values=list(choices), **shared)
            else:
                _FLAG[kind](field.name, **shared)

    @classmethod
    def from_flags(cls, flag_values=flags.FLAGS):
        """The settings given by the flags."""
        return cls(**{each.name: flag_values[each.name].value for each in _flags(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Settings):
    """The settings of a recipe that reads a data set."""

    STREAMED: ClassVar = False  # whether it may be too large to be arrays

    dataset: str = setting(
        "digits", "Data set: digits, mnist, cifar10, cifar100, or an .npz file."
    )
    train_size: int | None = setting(
        None, "Number of training images to use; all if not given.", at_least=1
    )
    data_dir: str | None = setting(
        None, "Directory of tensorflow_datasets.", compare=False
    )
    download: bool = setting(
        False, "Download the data set if it is not there.", compare=False
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dataset is not None:
            data.check(self.dataset, self.STREAMED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Settings):
    """Settings of many runs: a field whose name ends with s sweeps a field of one run.

    The class of a recipe also inherits from `RUN`. `activations = ("relu", "tanh")`
    means runs whose `activation` is one of these, and `seeds = 3` the seeds 0, 1 and 2.
    """

    RUN: ClassVar[type]

    seeds: int = setting(
        3, "Trainings of each kind, with the seeds 0, 1, ...", at_least=1
    )
    workers: int | None = setting(
        None,
        "Networks to train at once, each in a process; one for each core if not given.",
        at_least=1,
        compare=False,
    )

    def __init_subclass__(cls):
        """Swept fields take all but the default from the setting of one run."""
        super().__init_subclass__()
        of_run = getattr(getattr(cls, "RUN", None), "__dataclass_fields__", {})
        for name, value in list(vars(cls).items()):
            one, default = of_run.get(name.removesuffix("s")), _default(value)
            if one and name.endswith("s") and isinstance(default, tuple):
                about = {**one.metadata, **getattr(value, "metadata", {})}
                setattr(cls, name, setting(default, compare=one.compare, **about))

    @classmethod
    def from_flags(cls, flag_values=flags.FLAGS):
        made = super().from_flags(flag_values)
        made.runs()  # which checks what is swept
        return made

    def one(self, **values):
        """The settings of one run, of the class `RUN`."""
        names = [field.name for field in dataclasses.fields(self.RUN)]
        names = [name for name in names if not _is_swept(type(self), name)]
        return self.RUN(**{name: getattr(self, name) for name in names} | values)

    def runs(self, **values):
        """The settings of all runs: every combination of what is swept.

        Args:
            **values: Values of one run's settings, which are then not swept.
        """
        names = [field.name for field in dataclasses.fields(self.RUN)]
        swept = {
            name: getattr(self, f"{name}s")
            for name in names
            if _is_swept(type(self), name) and name not in values
        }
        swept["seed"] = range(self.seeds)
        return [
            self.one(**values, **dict(zip(swept, combination, strict=True)))
            for combination in itertools.product(*swept.values())
        ]


def _default(value):
    """The default of an attribute of a class, which may be a field."""
    return value.default if isinstance(value, Field) else value


def _is_swept(cls, name):
    return f"{name}s" in cls.__dataclass_fields__


def _flags(cls):
    """The fields that have a flag."""
    for field in dataclasses.fields(cls):
        if field.metadata and not _is_swept(cls, field.name):
            yield field


@functools.cache  # every run of a grid asks for every setting
def _kind(field):
    """The type of a setting without `None`, and the type of its items if several."""
    kind = field.type
    if isinstance(kind, types.UnionType):
        (kind,) = [each for each in typing.get_args(kind) if each is not type(None)]
    items = typing.get_args(kind)
    return typing.get_origin(kind) or kind, items[0] if items else None


_FLAG = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple: flags.DEFINE_list,
}
_BOUNDS = {"above": operator.gt, "at_least": operator.ge, "at_most": operator.le}
_MUST = {tuple: "be several values", bool: "be True or False"}


def _converted(field, value):
    kind, item = _kind(field)
    if kind is tuple and isinstance(value, (list, tuple)):
        try:
            return tuple(map(item, value))
        except (TypeError, ValueError):
            return tuple(value)
    return float(value) if kind is float and type(value) is int else value


def _check(field, value):
    """Raises a ValueError unless a setting can have a value."""
    (kind, item), about, name = _kind(field), field.metadata, field.name

    def refuse(must, which=""):
        received = f"{which}{name}={value!r}"
        raise ValueError(f"Argument `{name}` must {must}. Received: {received}")

    if value is None and type(None) in typing.get_args(field.type):
        return
    if type(value) is not kind:
        refuse(_MUST.get(kind, f"be of type {kind.__name__}"))
    if value == ():
        refuse("have a value")
    for each in value if kind is tuple else [value]:
        if kind is tuple and type(each) is not item:
            refuse(f"be values of type {item.__name__}")
        if must := _must(about, each):
            refuse(must, f"{each!r} in " if kind is tuple else "")


def _must(about, value):
    """The condition that a number or text fails, or `None`."""
    if about.get("choices") and value not in about["choices"]:
        return f"be of {', '.join(map(str, about['choices']))}"
    if "matches" in about and not re.match(about["matches"], value):
        return f"be {about['help'][0].lower()}{about['help'][1:].rstrip('.')}"
    if about.get("directory") and pathlib.Path(value).is_file():
        return "be a directory"
    if isinstance(value, float) and not math.isfinite(value):
        return "be finite"
    for key, bound in about.items():
        if key in _BOUNDS and not _BOUNDS[key](value, bound):
            must = f"be {key.replace('_', ' ')} {bound}"
            return "be positive" if must == "be above 0" else must
    return None


def _shown(value):
    if isinstance(value, (list, tuple)):
        return "+".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(key, value):
    """A named setting: words by themselves, numbers with their name."""
    if key == "dataset":
        return pathlib.Path(value).stem
    return value if isinstance(value, str) else f"{key}{_shown(value)}"
