"""Tests of the check before training: losses that are no mean, labels out of range, test data of another shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.config import Precision, RunConfig
from paceline.errors import WorkloadError
from paceline.training.checks.model import check_model
from paceline.workloads.batches import Share, make_source
from paceline.workloads.workload import Workload, count_top1

CPU = torch.device("cpu")
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


def check(
    model: nn.Module, test: Any = None, config: RunConfig | None = None, *, count_flop: bool = False, **fields: Any
) -> float | None:
    """Check a workload, on data for three classes unless it has its own."""
    workload = Workload(model=model, **{"train": (X, Y), "test": test, "loss": F.cross_entropy} | fields)
    train_source, test_source = (
        None if data is None else make_source(data, Share(0, 1, 1, CPU), batch=4, seed=0, train=train)
        for data, train in ((workload.train, True), (workload.test, False))
    )
    assert train_source is not None
    return check_model(model, workload, train_source, config or RunConfig(), 0, test_source, count_flop=count_flop)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def with_everything() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def in_batch(output: Tensor, _: Tensor) -> Tensor:
    """Contrastive loss, as of an untrained model: log 2 for two samples, and exactly twice that for four."""
    similarity = output @ output.T * 1e-6
    return F.cross_entropy(similarity, torch.arange(len(output)))


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum") * (1 + torch.rand(()))


def of_two_samples(output: Tensor, target: Tensor) -> Tensor:
    assert len(output) == 2
    return F.cross_entropy(output, target, reduction="sum")


Loss = Callable[[Tensor, Tensor], Tensor]
SUMS: list[Loss] = [
    nn.CrossEntropyLoss(reduction="sum"),
    lambda output, target: F.cross_entropy(output, target, reduction="sum") / 64,
    lambda output, target: F.mse_loss(output, F.one_hot(target, 3).float(), reduction="sum"),
]
NO_SUMS: list[Loss] = [
    F.cross_entropy,
    nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda output, target: F.cross_entropy(output, target) + output.square().mean(),
    lambda output, _: output.sum() * 0,
    in_batch,
    noisy,
    of_two_samples,
]


@pytest.mark.parametrize("model", [linear, with_everything])
@pytest.mark.parametrize("loss", SUMS, ids=["module", "divided by a constant", "squares"])
def test_a_sum_over_the_samples_is_refused(model: Callable[[], nn.Module], loss: Loss) -> None:
    with pytest.raises(WorkloadError, match="the loss is a sum over the samples") as caught:
        check(model(), loss=loss)
    assert "reduction='mean'" in (caught.value.hint or "")


def test_a_sum_in_a_step_is_refused() -> None:
    with pytest.raises(WorkloadError, match="the loss is a sum over the samples"):
        check(linear(), loss=None, step=lambda model, batch: model(batch[0]).square().sum())
    check(linear(), loss=None, step=lambda model, batch: model(batch[0]).square().mean())


@pytest.mark.parametrize("model", [linear, with_everything])
@pytest.mark.parametrize(
    "loss", NO_SUMS, ids=["mean", "smoothed", "penalty", "zero", "contrastive", "noisy", "fixed size"]
)
def test_what_is_no_sum_passes(model: Callable[[], nn.Module], loss: Loss) -> None:
    check(model(), loss=loss, correct=count_top1)


def test_a_share_in_place_of_a_count_is_refused() -> None:
    with pytest.raises(WorkloadError, match="`correct` does not count"):
        check(linear(), correct=lambda output, _: (output.argmax(1) >= 0).float().mean())
    with pytest.raises(WorkloadError, match=r"`correct` returned a tensor of shape \(2,\), not a number"):
        check(linear(), correct=lambda output, target: output.argmax(1) == target)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_a_loss_per_sample_is_refused(allow_unused: bool) -> None:
    with pytest.raises(WorkloadError, match=r"the loss is a tensor of shape \(2,\)"):
        check(linear(), config=RunConfig(allow_unused=allow_unused), loss=nn.CrossEntropyLoss(reduction="none"))


def test_parameters_without_a_gradient_are_named_unless_allowed() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    fields = {"loss": None, "step": lambda model, batch: F.cross_entropy(model["used"](batch[0]), batch[1])}
    with pytest.raises(WorkloadError, match=r"unused\.weight"):
        check(model, **fields)
    check(model, config=RunConfig(allow_unused=True), **fields)


def test_the_check_changes_nothing() -> None:
    model = with_everything()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        random.random(), np.random.random()
        return F.cross_entropy(output, target)

    check(model, test=(X, Y), loss=loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model] == [True, True, False, True, True]


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.parametrize("kind", ["training", "test"])
def test_a_label_that_the_model_has_no_output_for_is_named(kind: str, label: int, loss: Loss) -> None:
    wrong = Y.clone()
    wrong[7] = label
    data = {"training": {"train": (X, wrong)}, "test": {"test": (X, wrong)}}[kind]
    with pytest.raises(WorkloadError, match=f"sample 7 of the {kind} data has the label {label}, but the model has 3"):
        check(linear(), loss=loss, **data)


def test_labels_to_ignore_are_not_out_of_range() -> None:
    ignored = Y.clone()
    ignored[7] = -100
    check(linear(), train=(X, ignored))
    ignored[7] = 9
    check(linear(), train=(X, ignored), loss=nn.CrossEntropyLoss(ignore_index=9))


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ((X, Y.float()), "on its first batch", "class labels are integers, as y.long()"),
        ((torch.zeros(12, 4, dtype=torch.uint8), Y), "on its first batch", "as x.float() / 255 does"),
        ((X[:, :3], Y), "on its first batch: RuntimeError: mat1 and mat2 shapes", "see the traceback above"),
    ],
    ids=["float labels", "bytes", "shape"],
)
def test_a_batch_that_does_not_fit_the_model(data: Any, message: str, hint: str) -> None:
    with pytest.raises(WorkloadError, match=f"the model failed {message}") as caught:
        check(linear(), train=data)
    assert hint in (caught.value.hint or "")


def test_test_data_of_another_shape_is_found_before_training() -> None:
    check(linear(), test=(X, Y))
    check(linear(), test=iter([(X[:, :3], Y)]))
    for test in ((X[:, :3], Y), [(X[:, :3], Y)]):
        with pytest.raises(WorkloadError, match="the model failed on the test data: RuntimeError: mat1 and mat2"):
            check(linear(), test=test)


def test_data_that_is_not_finite_is_named_if_the_loss_is_not() -> None:
    broken = X.clone()
    broken[1, 2] = torch.nan
    with pytest.raises(WorkloadError, match="the training data contains NaN or infinity"):
        check(linear(), train=(broken, Y))
    masked = nn.Sequential(Filled(), linear())
    check(masked, train=(broken, Y))


class Filled(nn.Module):
    """Layer that replaces missing values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num(0.0)


class Ragged(Dataset[Any]):
    """Data set whose samples have different shapes, or fail."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("file 5 is truncated")
        return torch.ones(4 + (index == 1)), 0


def test_samples_that_do_not_form_a_batch_are_named() -> None:
    with pytest.raises(WorkloadError, match=r"samples 0 and 1 do not form a batch: their shapes are \(4,\) and \(5,\)"):
        check(linear(), train=Ragged())
    source = make_source(Ragged(), Share(0, 1, 1, CPU), batch=8, seed=0)
    with pytest.raises(WorkloadError, match="reading sample 5 of the data set failed: OSError: file 5 is truncated"):
        next(source.fetch(piece) for (piece,) in source.epoch(0))


class WithoutHalf(nn.Linear):
    """Layer that fails as torch's operations do that have no kernel for float16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.dtype == torch.float16:
            raise NotImplementedError(""""own_kernel" not implemented for 'Half'""")
        return y


@pytest.mark.parametrize(("precision", "fails"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_an_operation_without_float16_is_reported_with_another_precision(precision: Precision, fails: bool) -> None:
    config = RunConfig(precision=precision)
    if not fails:
        check(WithoutHalf(4, 3), config=config)
        return
    with pytest.raises(WorkloadError, match="not implemented for 'Half'") as caught:
        check(WithoutHalf(4, 3), config=config)
    assert "use --precision bf16 or fp32" in (caught.value.hint or "")


class Unsupported(nn.Module):
    """Model that does not run under a dispatch mode, such as that which counts FLOP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, unless a dispatch mode is active."""
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("no dispatch mode, please")
        return self.linear(x)  # type: ignore[no-any-return]


def test_the_flop_of_a_sample_are_counted() -> None:
    """A linear layer of 4 × 3 weights multiplies and adds 12 times per sample; backward takes twice as many."""
    assert check(linear(), count_flop=True) == 3 * 2 * 12
    assert check(linear()) is None
    assert check(linear(), config=RunConfig(allow_unused=True), count_flop=True) == 3 * 2 * 12


def test_a_model_whose_flop_cannot_be_counted_trains_all_the_same() -> None:
    torch.manual_seed(0)
    assert check(Unsupported(), count_flop=True) is None
