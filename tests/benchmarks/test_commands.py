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


def test_quantization():
    small = ["--norms=cbn,fused_cbn", "--seeds=1", "--epochs=1"]
    *_, cbn, fused = run("-m", "benchmarks.quantization", *small).splitlines()
    assert cbn.startswith("| cbn |")
    assert fused == cbn.replace("cbn", "fused_cbn")


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
