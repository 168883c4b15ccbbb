"""Tests of the check of a model before training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import Precision, RunConfig
from paceline.errors import WorkloadError
from paceline.training.model_check import check_gradients
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload


class WithoutHalf(nn.Linear):
    """Layer that fails as torch's operations do that have no kernel for float16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.dtype == torch.float16:
            raise NotImplementedError(""""own_kernel" not implemented for 'Half'""")
        return y


@pytest.mark.parametrize(("precision", "fails"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_an_operation_without_float16_is_reported_with_another_precision(precision: Precision, fails: bool) -> None:
    data = torch.randn(8, 4), torch.zeros(8, dtype=torch.long)
    workload = Workload(model=WithoutHalf(4, 3), train=data, loss=F.cross_entropy)
    source = make_source(workload.train, Share(0, 1, 1, torch.device("cpu"), torch.float32), batch=4, seed=0)
    config = RunConfig(precision=precision)
    if not fails:
        check_gradients(workload.model, workload, source, config, rank=0)
        return
    with pytest.raises(WorkloadError, match="not implemented for 'Half'") as caught:
        check_gradients(workload.model, workload, source, config, rank=0)
    assert "use --precision bf16 or fp32" in (caught.value.hint or "")
