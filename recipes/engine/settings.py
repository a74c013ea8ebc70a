"""Settings: frozen dataclasses, of which flags, names, checks and JSON are made.

A setting is described once, in the class of what it is a setting of:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Training(Settings):
        NAMED = ("dataset",)
        dataset: str = setting("digits", "Name of the data set.")
        epochs: int | None = setting(None, "120; of digits 15.", at_least=1)

A class that changes a default repeats the name alone: `epochs: int = 30`. Settings with
`compare=False`, such as places of files, do not decide the outcome: they are neither in
the name nor in the JSON of a run. `None` becomes what `usual` says.
"""

import dataclasses
import itertools
import math
import pathlib
import types
import typing
from typing import ClassVar

import keras
from absl import flags

flags.disclaim_key_flags()  # --help of a recipe shows them as its own


def setting(
    default, help, *, choices=None, above=None, at_least=None, at_most=None, **kwargs
):
    """A field of a `Settings` class.

    Args:
        default: Its value; `None` if that depends on other settings.
        help: Text of the flag.
        choices: The values that there are.
        above, at_least, at_most: Bounds of a number.
        **kwargs: `compare=False`, where it does not decide the outcome.
    """
    checks = {"choices": choices, "above": above, "at_least": at_least}
    metadata = {"help": help, **checks, "at_most": at_most}
    return dataclasses.field(default=default, metadata=metadata, **kwargs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings.

    Raises:
        ValueError: If a value is not one that its setting can have.
    """

    NAMED: ClassVar = ()  # in every name, by their values
    VARIABLE: ClassVar = ()  # what does not change the compiled network

    runs_dir: str = setting("runs", "Where runs are recorded.", compare=False)
    backend: str | None = None  # of Keras; no flag

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = _converted(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
        for name, value in (
            {"backend": keras.backend.backend()} | self.usual()
        ).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            _check(type(self), field.name, getattr(self, field.name))

    def usual(self):
        """A dict of what stands for `None`."""
        return {}

    def config(self):
        """What decides the outcome, as JSON has it."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            if field.compare
            for value in [getattr(self, field.name)]
        }

    def label(self):
        """What it is, then every setting that is not the default."""
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

    def directory(self, recipe):
        """Where the outcome of a recipe goes, by what was asked."""
        return pathlib.Path(self.runs_dir) / "-".join(
            filter(None, [recipe, self.label()])
        )

    def program(self):
        """What networks have in common that are compiled once."""
        return type(self).__qualname__, *(
            (name, getattr(self, name))
            for name in self.config()
            if name not in self.VARIABLE
        )

    @classmethod
    def define_flags(cls, flag_values=flags.FLAGS):
        """Defines a flag for each setting that is not one of several."""
        for name, default, about in _flags(cls):
            define, arguments = _FLAG[_kind(cls, name)], {}
            choices = about["choices"]
            if choices and define is flags.DEFINE_string:
                define, arguments = flags.DEFINE_enum, {"enum_values": list(choices)}
            if isinstance(default, tuple):
                default = [_shown(value) for value in default]
            define(
                name,
                default=default,
                help=about["help"],
                flag_values=flag_values,
                **arguments,
            )

    @classmethod
    def from_flags(cls, flag_values=flags.FLAGS):
        """The settings that the flags say."""
        return cls(**{name: flag_values[name].value for name, _, _ in _flags(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Settings):
    """Settings of what reads a data set."""

    dataset: str = setting(
        "digits", "digits, mnist, cifar10, cifar100, or the path of an .npz file."
    )
    train_size: int | None = setting(
        None, "Use so many training images only.", at_least=1
    )
    data_dir: str | None = setting(
        None, "Where tensorflow_datasets looks.", compare=False
    )
    download: bool = setting(
        False, "Download the data set if it is not there.", compare=False
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(Settings):
    """Settings of many runs: a field whose name ends with s says what one of them has.

    A class of a recipe is one of `RUN` too. `activations = ("relu", "tanh")` are runs
    whose `activation` is one of these, `seeds = 3` are the seeds 0, 1 and 2.
    """

    RUN: ClassVar[type]

    seeds: int = setting(3, "How many seeds, from 0 on.", at_least=1)
    workers: int | None = setting(
        None,
        "Networks that train at the same time, each in a process; one for each core.",
        at_least=1,
        compare=False,
    )

    def one(self, **values):
        """The settings of one run, of the class `RUN`."""
        names = [field.name for field in dataclasses.fields(self.RUN)]
        shared = {
            name: getattr(self, name)
            for name in names
            if not _is_swept(type(self), name)
        }
        return self.RUN(**shared | values)

    def runs(self, **values):
        """The settings of all runs: every combination of what is swept.

        Args:
            **values: What one run has in place of that: a value of the setting.
        """
        swept = {
            name: getattr(self, f"{name}s")
            for name in (field.name for field in dataclasses.fields(self.RUN))
            if _is_swept(type(self), name) and name not in values
        }
        swept["seed"] = range(self.seeds)
        return [
            self.one(**values, **dict(zip(swept, combination, strict=True)))
            for combination in itertools.product(*swept.values())
        ]


def _is_swept(cls, name):
    return f"{name}s" in cls.__dataclass_fields__


def _flags(cls):
    """Name, default and description of each setting that has a flag."""
    for field in dataclasses.fields(cls):
        about = _about(cls, field.name)
        if about and not _is_swept(cls, field.name):
            yield field.name, field.default, about


def _about(cls, name):
    """What `setting` was given, also where a subclass changes the default alone."""
    for base in cls.__mro__:
        field = base.__dict__.get("__dataclass_fields__", {}).get(name)
        if field is not None and field.metadata:
            return field.metadata
    return {}


def _kind(cls, name):
    """The type of a setting without `None`, of several ones `tuple`."""
    kind = _without_none(cls.__dataclass_fields__[name].type)
    return typing.get_origin(kind) or kind


def _without_none(kind):
    if isinstance(kind, types.UnionType):
        (kind,) = [each for each in typing.get_args(kind) if each is not type(None)]
    return kind


_FLAG = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    tuple: flags.DEFINE_list,
}


def _converted(field, value):
    kind = _without_none(field.type)
    if typing.get_origin(kind) is tuple and not isinstance(value, str):
        item = typing.get_args(kind)[0]
        try:
            return tuple(item(each) for each in value)
        except (TypeError, ValueError):
            return value
    if kind is float and type(value) is int:
        return float(value)
    return value


def _check(cls, name, value):
    """Raises a ValueError unless a setting can have a value."""

    def refuse(must):
        raise ValueError(f"Argument `{name}` must {must}. Received: {name}={value!r}")

    kind, about = _kind(cls, name), _about(cls, name)
    described = cls.__dataclass_fields__[name].type
    if value is None and type(None) in typing.get_args(described):
        return
    if type(value) is not kind:
        words = {tuple: "be several values", bool: "be True or False"}
        refuse(words.get(kind, f"be of type {kind.__name__}"))
    for each in value if kind is tuple else [value]:
        if about.get("choices") and each not in about["choices"]:
            refuse(f"be of {', '.join(map(str, about['choices']))}")
        if isinstance(each, float) and not math.isfinite(each):
            refuse("be finite")
        if (bound := about.get("above")) is not None and not each > bound:
            refuse(f"be above {bound}" if bound else "be positive")
        if (bound := about.get("at_least")) is not None and not each >= bound:
            refuse(f"be at least {bound}")
        if (bound := about.get("at_most")) is not None and not each <= bound:
            refuse(f"be at most {bound}")


def _shown(value):
    if isinstance(value, (list, tuple)):
        return "+".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _text(key, value):
    """A named setting: words by themselves, numbers with their name."""
    if key == "dataset":
        return pathlib.Path(value).stem
    return value if isinstance(value, str) else f"{key}{_shown(value)}"
