"""Random number generators of a rank in a checkpoint: Python's, numpy's, and torch's on the CPU and the GPU."""

from __future__ import annotations

import random

import numpy as np
import torch

from paceline.records.checkpoint import RandomStateInfo

_WORDS = np.dtype("<u4")


def random_state_info(device: torch.device) -> RandomStateInfo:
    """Return the present state of all generators of this rank."""
    _, words, gauss = random.getstate()
    *key, position = words
    numpy_state = np.random.get_state(legacy=False)
    kept = numpy_state["state"]
    return RandomStateInfo(
        python=np.array([*key, position], dtype=_WORDS).tobytes(),
        python_gauss=gauss,
        numpy_key=np.asarray(kept["key"]).astype(_WORDS).tobytes(),
        numpy_position=int(kept["pos"]),
        numpy_gauss=float(numpy_state["gauss"]) if numpy_state["has_gauss"] else None,
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        cuda=torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None,
    )


def restore_random_state(info: RandomStateInfo, device: torch.device) -> None:
    """Set all generators of this rank to a kept state; that of a GPU only if one was kept."""
    words = np.frombuffer(info.python, dtype=_WORDS).tolist()
    random.setstate((3, tuple(words), info.python_gauss))
    key = np.frombuffer(info.numpy_key, dtype=_WORDS).astype(np.uint32)
    has_gauss = info.numpy_gauss is not None
    np.random.set_state(("MT19937", key, info.numpy_position, int(has_gauss), info.numpy_gauss or 0.0))
    torch.set_rng_state(torch.frombuffer(bytearray(info.torch_cpu), dtype=torch.uint8))
    if info.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(info.cuda), dtype=torch.uint8), device)
