"""Test of the benchmark of a GPU, on a CPU and without graphs: candidates train, and figures fit each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURE = """
import gpu
from free_port import free_port
from paceline.comm.network import LOOPBACK
from paceline.comm.world import join_world
import os, sys
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
gpu.BLOCK_S = 0.01
gpu.SETTINGS[gpu.OURS] = {}
world = join_world(timeout_s=60)
rows, _ = gpu.measure(16, 2, world, "cpu", [gpu.EAGER, gpu.OURS])
eager, ours = rows
assert (eager.candidate, ours.candidate) == (gpu.EAGER, gpu.OURS)
assert eager.to_eager.median == 1
assert ours.to_bare_graph is None
assert all(abs(row.epoch_s - row.step_ms / 1e3 * gpu.IMAGES / 16) < 1e-9 for row in rows)

host = gpu.compare_host(16, world, "cpu")
operations = {time.name: time for time in host["operation"]}
convolution = operations["aten::convolution"]
assert convolution.calls == convolution.base_calls == 2
assert min(convolution.us, convolution.base_us) > 0
backward = next(time for time in host["function"] if "run_backward" in time.name)
assert backward.calls == backward.base_calls == 1
for kind, times in host.items():
    gpu.show_host(times, kind, gpu.Console(file=sys.stderr))
os._exit(0)
"""

pytestmark = pytest.mark.takes(15)


def test_hand_written_and_paceline_s_steps_are_timed() -> None:
    command = [sys.executable, "-W", "ignore", "-c", MEASURE]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_crops_are_parts_of_the_image_and_half_are_mirrored() -> None:
    code = """
import torch
from torch import nn
from hand_written import PAD, HandWritten
images = torch.arange(1, 8 * 2 * 6 * 6 + 1).view(8, 2, 6, 6).float()
loop = HandWritten(nn.Linear(1, 1), images, torch.arange(8), 2)
padded = nn.functional.pad(images, [PAD] * 4)
mirrored = 0
for chosen in torch.arange(8).repeat(25).split(1):
    crop, image = loop._augmented(chosen)[0], padded[chosen[0]]
    crops = {(flip, top, left): image[:, top:top + 6, left:left + 6].flip([2] if flip else [])
             for flip in (0, 1) for top in range(9) for left in range(9)}
    found = [key for key, one in crops.items() if torch.equal(one, crop)]
    assert found, "it is no crop of the image"
    mirrored += found[0][0]
assert 60 < mirrored < 140, mirrored
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
