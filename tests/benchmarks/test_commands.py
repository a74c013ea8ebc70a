"""The commands themselves, and what takes as long."""

import json
import re

import pytest

from benchmarks import hub
from tests.support.backend import once
from tests.support.processes import run

pytestmark = pytest.mark.thorough


@pytest.fixture
def made(tmp_path):
    """What a benchmark prints, and the report that it writes."""

    def made(name, *flags, **environment):
        flags = *flags, f"--output={tmp_path}/report.json"
        printed = run("-m", f"benchmarks.{name}", *flags, **environment)
        return printed, json.loads((tmp_path / "report.json").read_text())

    return made


def test_network(made):
    small = ["--networks=vgg16:4:2", "--norms=bn,cbn", "--steps=1", "--rounds=3"]
    printed, report = made("network", *small, "--skip=.")
    assert report["benchmark"] == "network"
    bn, skipped = report["rows"]
    assert skipped["bytes_of_passes"] == bn["bytes_of_passes"] > 0 and bn["ratio"] == 1
    for row in (bn, skipped):
        assert row["images_per_second"] == pytest.approx(2 / row["seconds_per_step"])
        assert f"| vgg16, 2 x 4 | {row['norm']} |" in printed


@pytest.mark.parametrize("flag", ["--kernels", "--group_size=2"])
def test_layer(made, flag):
    _, report = made("layer", flag, "--shapes=2x4x4x8", "--rounds=4")
    yardstick, *others = report["rows"]
    assert yardstick["ratio"] == 1 and len(others) >= 3
    assert (yardstick["floor_milliseconds"] == 0) == (flag == "--kernels")


def test_sweep(made):
    printed, report = made("sweep", "--largest=100", "--rounds=4")
    assert [row["shape"] for row in report["rows"]] == 2 * [[33, 3], [8, 2, 2, 3]]
    assert printed.count("| 33x3 |") == printed.count("| 8x2x2x3 |") == 1


@once
def test_quantization():
    small = ["--norms=cbn,fused_cbn", "--seeds=1", "--epochs=1"]
    *_, cbn, fused = run("-m", "benchmarks.quantization", *small).splitlines()
    assert cbn.startswith("| cbn |")
    assert fused == cbn.replace("cbn", "fused_cbn")


@once
def test_deployment(made):
    for package in ("tensorflow", "tf2onnx", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    small = ["--networks=resnet8", "--norms=cbn", "--epochs=1", "--test_size=9"]
    _, report = made("deployment", *small, "--rounds=4", KERAS_BACKEND="tensorflow")
    rows = {row["format"]: row for row in report["rows"]}
    exact = [row for name, row in rows.items() if "int8" not in name]
    assert len(rows) == 9 and len(exact) == 5
    assert max(row["largest_error"] for row in exact) < 1e-3
    assert all(row["same_class"] == 1 for row in exact)
    for name in ("LiteRT", "ONNX Runtime"):
        assert rows[f"{name} int8"]["bytes"] < rows[name]["bytes"] / 2


@once
def test_groups(made):
    printed, report = made("groups", "--group_sizes=0,1024", "--seeds=2", "--steps=1")
    *_, whole, one_group = printed.splitlines()
    assert one_group == whole.replace("whole batch", "1024")
    assert [row["group_size"] for row in report["rows"]] == [0, 1024]


def test_inference(made):
    printed, report = made("inference", "--networks=resnet8:8:2", "--rounds=4")
    assert [row["shifts_that_stay"] for row in report["rows"]] == [0, 0, 0, 0, 6]
    assert "| resnet8, 2 x 8x8 |" in printed


BAD = [
    ("network", "--norms=cbn", "must have bn among them"),
    ("memory", "--norms=cbn", "must have bn among them"),
    ("amat", "--rounds=2", "2 is not integer >= 3"),
    ("network", "--networks=foo", "image size:batch size.*Received: foo"),
    ("network", "--rounds=2", "2 is not integer >= 3"),
    ("amat", "--rates=never", "must be of constant, schedule, callback"),
    ("applications", "--models=None", "must be of ResNet50, "),
    ("deployment", "--norms=gn", "must be of bn, bn_pruned, cbn, cbn_pruned"),
    ("deployment", "--networks=resnet8,foo", "Received: model='foo'"),
    ("gpu", "--norms=cbn,gn", "must be of none, bn, cbn, .*lp_norm:inf"),
    ("groups", "--group_sizes=8,a", "must be integers"),
    ("hub", "--networks=None", "must be of ResNet, "),
    ("layer", "--shapes=8x2,8", "must be like 128x64"),
    ("probe", "--norms=bn,gn", "must be of none, bn, cbn, .*lp_norm:inf"),
    ("amat", "--network=foo:32:2", "with a name of resnet20,.*foo:32:2"),
    ("inference", "--networks=ResNet50", "image size:batch size. Received: ResNet"),
    ("inference", "--networks=resnet8:8:2,vgg16:8:2", "names of keras.applicat"),
    ("quantization", "--norms=gn", "must be of none, bn, cbn, fused_cbn"),
    ("tpu", "--group_size=8", "--group_size are those of --check"),
    ("tpu", "--networks=vgg16", "--group_size are those of --check"),
    ("tpu", "--norms=cbn,gn", "must be of none, bn, cbn, .*lp_norm:inf"),
]
# Each program in a fork of a process with Keras, which takes seconds to start and to
# end. What it prints is in a file.
FORKS = """
import os, runpy, sys
from benchmarks import networks
folder, *words = sys.argv[1:]
for number, (name, flag) in enumerate(zip(words[::2], words[1::2])):
    if os.fork():
        assert os.wait()[1], (name, flag)
        continue
    sys.argv, code = [name, flag], 0
    with open(f"{folder}/{number}", "w") as sys.stderr:
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        except SystemExit as end:
            code = end.code
    os._exit(code)
"""


@once
def test_bad_arguments(tmp_path):
    words = [word for name, flag, _ in BAD for word in (name, flag)]
    run("-c", FORKS, str(tmp_path), *words)
    for number, (*case, message) in enumerate(BAD):
        printed = (tmp_path / str(number)).read_text()
        assert re.search(message, printed), (case, printed)


@once
@pytest.mark.parametrize("name", hub.NETWORKS)
def test_networks_of_keras_hub(name):
    """Converted, trained, saved, loaded and folded."""
    pytest.importorskip("keras_hub")
    row = hub.check(name)
    assert row["spread"] > 1e-3  # The outputs say something.
    assert row["BatchNormalization"] > 0
    assert row["left"] == 0 and row["warnings"] == []
    assert row["preserve"] <= hub.PRESERVE_LIMIT
    assert row["losses"][0] != row["losses"][1]
    assert row["load"] <= 1e-6
    assert row["fold"] <= hub.FOLD_LIMIT and row["CBN fold"] <= hub.FOLD_LIMIT
    assert row["unchanged"]
