"""The commands themselves."""

import json

import pytest

from tests.support.processes import run

pytestmark = pytest.mark.thorough


def test_network(tmp_path):
    output = tmp_path / "report.json"
    small = ["--networks=vgg16:4:2", "--norms=bn", "--steps=1", "--rounds=2"]
    printed = run("-m", "benchmarks.network", *small, f"--output={output}")
    report = json.loads(output.read_text())
    assert report["benchmark"] == "network"
    assert [row["ratio"] for row in report["rows"]] == [1]
    assert "| vgg16, 2 x 4 | bn |" in printed


def test_sweep(tmp_path):
    output = tmp_path / "report.json"
    small = ["--largest=100", "--rounds=4"]
    printed = run("-m", "benchmarks.sweep", *small, f"--output={output}")
    rows = json.loads(output.read_text())["rows"]
    assert [row["shape"] for row in rows] == 2 * [[33, 3], [8, 2, 2, 3]]
    assert printed.count("| 33x3 |") == printed.count("| 8x2x2x3 |") == 1


def test_quantization():
    small = ["--norms=cbn,fused_cbn", "--seeds=1", "--epochs=1"]
    *_, cbn, fused = run("-m", "benchmarks.quantization", *small).splitlines()
    assert cbn.startswith("| cbn |")
    assert fused == cbn.replace("cbn", "fused_cbn")


def test_deployment(tmp_path):
    for package in ("tensorflow", "tf2onnx", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    output = tmp_path / "report.json"
    small = ["--networks=resnet8", "--norms=cbn", "--epochs=1", "--test_size=9"]
    command = ("-m", "benchmarks.deployment", *small, "--rounds=4")
    run(*command, f"--output={output}", KERAS_BACKEND="tensorflow")
    rows = json.loads(output.read_text())["rows"]
    exact = [row for row in rows if "int8" not in row["format"]]
    assert len(rows) == 9 and len(exact) == 5
    assert max(row["largest_error"] for row in exact) < 1e-3
    assert all(row["same_class"] == 1 for row in exact)
    sizes = {row["format"]: row["bytes"] for row in rows}
    assert all(
        sizes[f"{name} int8"] < sizes[name] / 2 for name in ("LiteRT", "ONNX Runtime")
    )


def test_groups():
    small = ["--group_sizes=0,1024", "--seeds=2", "--steps=1"]
    *_, whole, one_group = run("-m", "benchmarks.groups", *small).splitlines()
    assert one_group == whole.replace("whole batch", "1024")


@pytest.mark.parametrize(
    "name, argument, expected",
    [
        ("network", "--norms=cbn", "--norms must have bn among them"),
        ("memory", "--norms=cbn", "--norms must have bn among them"),
        ("amat", "--network=resnet20", "Received: resnet20"),
    ],
)
def test_bad_arguments(name, argument, expected):
    assert expected in run("-m", f"benchmarks.{name}", argument, succeeds=False)
