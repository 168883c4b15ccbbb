"""SGD and AdamW of torch, with steps that do not import torch's compiler, which would take longer than a short run.

Torch's own call the compiler before and after a step, so that it never traces one. Paceline compiles models, not steps.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class SGD(torch.optim.SGD):
    """Torch's SGD."""

    step = torch.no_grad()(unwrap(torch.optim.SGD.step))


class AdamW(torch.optim.AdamW):
    """Torch's AdamW."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
