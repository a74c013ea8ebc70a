import json

import keras
import pytest

from recipes import experiment

CONFIG = {"norm": "cbn", "seed": 0, "train_size": None}


def test_the_same_settings_open_the_same_run(tmp_path):
    run = experiment.Run(tmp_path / "runs" / "a", CONFIG)
    assert run.results is None and run.metrics == []
    run.log(epoch=1, loss=0.5)
    run.finish({"accuracy": 0.9})
    again = experiment.Run(tmp_path / "runs" / "a", dict(CONFIG))
    assert again.results == {"accuracy": 0.9}
    assert again.metrics == [{"epoch": 1, "loss": 0.5}]
    assert json.loads((run.directory / "config.json").read_text()) == CONFIG


def test_other_settings_are_refused(tmp_path):
    experiment.Run(tmp_path / "a", CONFIG)
    other = {"norm": "bn", "seed": 0, "train_size": None, "epochs": 3}
    with pytest.raises(ValueError) as error:
        experiment.Run(tmp_path / "a", other)
    message = str(error.value)
    assert "norm: 'cbn' there, 'bn' here" in message
    assert "epochs: None there, 3 here" in message
    assert "seed" not in message and "--name" in message


def test_a_line_cut_by_the_end_of_the_process_is_dropped(tmp_path):
    run = experiment.Run(tmp_path / "a", CONFIG)
    for epoch in (1, 2, 3):
        run.log(epoch=epoch)
    with open(run.directory / "metrics.jsonl", "a") as file:
        file.write('{"epoch"')
    assert [line["epoch"] for line in run.metrics] == [1, 2, 3]
    run.keep(2)
    run.log(epoch=3, loss=float("nan"))
    assert run.metrics == [{"epoch": 1}, {"epoch": 2}, {"epoch": 3, "loss": None}]


def test_write_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    experiment.write(path, lambda temporary: temporary.write_text("old"))

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        experiment.write(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_saved_model_that_is_damaged_or_gone_is_named(tmp_path):
    path = tmp_path / "a.keras"
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save(path)
    assert experiment.load_model(path).count_params() == 3
    content = path.read_bytes()
    flipped = content[:-900] + bytes([content[-900] ^ 1]) + content[-899:]
    for damaged in (b"", content[:-1], flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.keras cannot be loaded: .*delete it"):
            experiment.load_model(path)
    path.unlink()
    with pytest.raises(ValueError, match="a.keras cannot be loaded: .*not found"):
        experiment.load_model(path)


def test_json_has_no_nan(tmp_path):
    value = {"a": [1.0, float("inf"), {"b": float("nan")}], "c": "d", "e": None}
    experiment.write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"a": [1.0, None, {"b": None}], "c": "d", "e": None}
