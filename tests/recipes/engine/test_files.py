import json
import os

import pytest

from recipes.engine import files


def test_write_is_whole_and_on_the_disk_or_not_at_all(tmp_path, monkeypatch):
    path, synced, sync = tmp_path / "deep" / "file.txt", [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(sync(file)))
    files.write(path, lambda temporary: temporary.write_text("old"))
    assert len(synced) == 1

    def fail(temporary):
        temporary.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        files.write(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_json_has_no_nan_and_damage_is_named(tmp_path):
    path = tmp_path / "a.json"
    value = {"a": [1.0, float("inf"), {"b": float("nan")}], "c": "d", "e": None}
    files.write_json(path, value)
    expected = {"a": [1.0, None, {"b": None}], "c": "d", "e": None}
    assert json.loads(path.read_text()) == files.read_json(path) == expected
    for text in ("", '{"a": 1', "[1]", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="a.json is damaged.*delete the directory"):
            files.read_json(path)
