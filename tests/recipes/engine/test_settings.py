import dataclasses
import itertools
import json
import pickle

import pytest
from absl import flags

from recipes import compare
from recipes.engine import classifier, command, data, settings
from recipes.engine.settings import setting
from tests.support.backend import BACKEND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cooking(settings.Settings):
    NAMED = ("dish", "seed")
    VARIABLE = ("seed", "salt")

    dish: str = setting("soup", "What.", choices=["soup", "stew"])
    seed: int = setting(0, "Of luck.", at_least=0)
    salt: float = setting(0.5, "Grams.", above=0, at_most=2)
    hours: int | None = setting(None, "1; of stew 4.", at_least=1)
    cover: bool | None = setting(None, "Whether there is a lid.")
    herbs: tuple[str, ...] = setting(("dill",), "Which.")
    places: tuple[float, ...] | None = setting(None, "Where.", at_least=0)
    cook: str | None = setting(None, "Who.", compare=False)

    def usual(self):
        return {"hours": 4 if self.dish == "stew" else 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Menu(Cooking, settings.Sweep):
    RUN = Cooking

    hours: int | None = 2
    cook: str | None = "I"
    salts: tuple[float, ...] = (0.5, 1.0)
    dishs: tuple[str, ...] = setting(("stew", "soup"), "Dishes.")


SHARED = "" if BACKEND == "tensorflow" else f"-backend{BACKEND}"


def test_flags():
    arguments = ["--dish=stew", "--salt=1", "--nocover", "--herbs=a,b", "--places=1,2"]
    made = command.parse(Cooking, [*arguments, "--cook=me", "--runs_dir=x"])
    given = {"dish": "stew", "salt": 1.0, "cover": False, "herbs": ("a", "b")}
    assert made == Cooking(**given, places=(1, 2), hours=4)
    assert (made.cook, made.runs_dir) == ("me", "x")
    for bad, message in (
        ("--pepper=1", "pepper"),
        ("pepper", "must be flags.* Received: .'pepper'"),
    ):
        with pytest.raises((ValueError, flags.Error), match=message):
            command.parse(Cooking, [bad])


def test_usual_values_are_in_the_place_of_none():
    assert Cooking().hours == 1 and Cooking(dish="stew").hours == 4
    assert Cooking(dish="stew", hours=2).hours == Menu().hours == 2
    for dataset, *expected in (
        ("digits", 15, 128, 5e-4, False, None),
        ("x/cifar10.npz", 120, 128, 5e-4, True, None),
        ("imagenet2012", 120, 256, 1e-4, True, 224),
    ):
        one = classifier.Training(dataset=dataset)
        found = [one.epochs, one.batch_size, one.weight_decay, one.augment]
        assert [*found, one.image_size] == expected
    grid = classifier.Grid(seeds=1, dataset="a/mnist.npz")
    assert {run.epochs for run in grid.runs()} == {10}


def test_labels():
    assert Cooking().label() == f"soup-seed0{SHARED}"
    many = Cooking(dish="stew", seed=3, hours=5, cover=True, herbs=["a", "b"], cook="x")
    assert many.label() == f"stew-seed3{SHARED}-coverTrue-herbsa+b-hours5"
    assert Cooking(salt=0.1 + 0.2).label() == f"soup-seed0{SHARED}-salt0.3"
    # Nor does `cook` decide the outcome where a class has another default.
    changed = Menu(seeds=5, salts=(2,), cook="you", runs_dir="a/b")
    assert str(changed.directory("menu")) == f"a/b/menu{SHARED}-salts2-seeds5"
    # Long ones are cut, and differ.
    herbs = ([*map(str, range(n))] for n in (100, 101))
    long = {Menu(herbs=each).directory("menu").name for each in herbs}
    assert len(long) == 2 and {len(name) for name in long} == {200}


def test_settings_are_json_and_keys():
    config = Cooking(herbs=("a", "b"), cook="me").config()
    usual = {"backend": BACKEND, "dish": "soup", "seed": 0, "salt": 0.5, "hours": 1}
    others = {"cover": None, "herbs": ["a", "b"], "places": None}
    assert json.loads(json.dumps(config)) == usual | others
    one = Cooking(cook="me")
    assert {one: 1}[Cooking(hours=1)] == 1 and pickle.loads(pickle.dumps(one)) == one


def test_bad_values(monkeypatch):
    for name, value, must in (
        ("dish", "pie", "be of soup, stew"),
        ("seed", -1, "be at least 0"),
        ("seed", True, "be of type int"),
        ("salt", 0.0, "be positive"),
        ("salt", float("nan"), "be finite"),
        ("cover", 1, "be True or False"),
        ("herbs", "ab", "be several values"),
        ("places", ["x"], "be values of type float"),
        ("herbs", [], "have a value"),
        ("runs_dir", __file__, "be a directory"),
    ):
        with pytest.raises(ValueError, match=rf"`{name}` must {must}\. Received: "):
            Cooking(**{name: value})
    monkeypatch.setattr(Cooking, "define_flags", lambda: None)
    monkeypatch.setattr(Cooking, "from_flags", lambda: Cooking(salt=0.0))
    for left, message in (
        ([], "`salt` must be positive"),
        (["dish=pie"], "must be flags.*dish=pie"),
    ):
        monkeypatch.setattr(command.app, "run", lambda main, x=left: main(["", *x]))
        with pytest.raises(SystemExit, match=f"{message}.*\n.*--help"):
            command.run(None, Cooking)


def test_the_command_line_ends_without_a_traceback(monkeypatch, capsys):
    """Where a user can mend what is wrong, and after Ctrl-C."""

    def recipe(settings):
        return data.load("nowhere.npz")

    def stopped(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(Cooking, "define_flags", lambda: None)
    monkeypatch.setattr(Cooking, "from_flags", Cooking)
    monkeypatch.setattr(command.app, "run", lambda main: main([""]))
    with pytest.raises(SystemExit, match="an existing .npz file.*'nowhere.npz'$"):
        command.run(recipe, Cooking)
    with pytest.raises(SystemExit, match="130"):
        command.run(stopped, Cooking)
    assert "Run the same command to continue" in capsys.readouterr().err


def test_what_is_swept_is_checked_as_the_setting_of_one_run():
    made = command.parse(Menu, ["--dishs=soup", "--salts=1,2"])
    assert (made.dishs, made.salts) == (("soup",), (1.0, 2.0))
    values = flags.FlagValues()
    Menu.define_flags(values)
    found = [values[name].help for name in ("dishs", "salts")]
    assert found == ["Dishes. Of soup, stew.", "Grams."]
    for name, value, must in (
        ("dishs", ("pie",), "be of soup, stew"),
        ("salts", (1.0, 3.0), "be at most 2"),
    ):
        match = rf"`{name}` must {must}\. Received: {value[-1]!r} in {name}="
        with pytest.raises(ValueError, match=match):
            Menu(**{name: value})


def test_runs_of_a_sweep():
    menu = Menu(seeds=2, herbs=("a",), cook="me", runs_dir="x")
    runs = menu.runs()
    found = {(run.dish, run.salt, run.seed) for run in runs}
    cells = itertools.product(("stew", "soup"), (0.5, 1.0), (0, 1))
    assert found == set(cells) and len(runs) == 8
    assert all(type(run) is Cooking and run.herbs == ("a",) for run in runs)
    assert {(run.hours, run.cook, run.runs_dir) for run in runs} == {(2, "me", "x")}
    only = menu.runs(dish="soup", hours=9)
    assert {(run.dish, run.hours) for run in only} == {("soup", 9)} and len(only) == 4


def test_runs_have_no_settings_that_their_norm_does_not_use():
    def found(norm, **given):
        grid = compare.Settings(norms=(norm,), activations=("relu",), seeds=1, **given)
        (run,) = grid.runs()
        return run.rho, run.stage_rho, run.omega

    given = {"rho": 2.0, "stage_rho": "stage1=3", "omega": 5.0}
    assert found("cbn", **given) == (2.0, "stage1=3", 5.0)
    assert found("cbn_batch", **given) == (2.0, "stage1=3", 10.0)
    assert found("bn", **given) == (1.0, None, 10.0)
