"""The commands themselves."""

import json
import subprocess
import sys

import pytest


def run(name, *arguments):
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_network(tmp_path):
    output = tmp_path / "report.json"
    small = ["--networks=vgg16:4:2", "--norms=bn", "--steps=1", "--rounds=2"]
    done = run("network", *small, f"--output={output}")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["benchmark"] == "network"
    assert [row["ratio"] for row in report["rows"]] == [1]
    assert "| vgg16, 2 x 4 | bn |" in done.stdout


def test_quantization():
    done = run("quantization", "--norms=cbn,fused_cbn", "--seeds=1", "--epochs=1")
    assert done.returncode == 0, done.stderr[-3000:]
    cbn, fused = done.stdout.splitlines()[-2:]
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
    done = run(name, argument)
    assert done.returncode != 0
    assert expected in done.stdout + done.stderr
