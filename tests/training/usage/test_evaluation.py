"""Tests of evaluation between steps, training mode, `agreed`, and BatchNorm."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.usage.loops import Loop, Results, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(5)

ONES = torch.ones(2, 6, dtype=torch.float64)


def evaluation_on_the_bare_model(loop: Loop) -> Results:
    """The model, not `sync.model`, is evaluated after each step, without gradients."""
    model = make_model(with_dropout)
    sync = loop.attach(model)
    outputs = []
    for x, y in loop.batches():
        model.train()
        model[1].p = 0.0
        loss_of(sync.model(x), y).backward()
        sync.step()
        model.eval()
        with torch.no_grad():
            outputs.append(model(ONES))
    return [weights(model), *outputs]


def evaluation_on_sync_model(loop: Loop) -> Results:
    model = make_model(with_dropout)
    model[1].p = 0.0
    sync = loop.attach(model)
    outputs = []
    for x, y in loop.batches():
        sync.model.train()
        loss_of(sync.model(x), y).backward()
        sync.step()
        sync.model.eval()
        assert not model.training
        with torch.inference_mode():
            outputs.append(sync.model(ONES).clone())
    return [weights(model), *(torch.tensor(one.tolist(), dtype=torch.float64) for one in outputs)]


def evaluation_on_one_rank(loop: Loop) -> Results:
    """Only rank 0 evaluates the bare model, in evaluation mode; the other does not take part."""
    model = make_model()
    sync = loop.attach(model)
    outputs = []
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        if sync.rank == 0:
            model.eval()
            with torch.no_grad():
                model(ONES)
            model.train()
        outputs.append(weights(model))
    return outputs


def validation_loss_between_forward_and_backward(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss = loss_of(sync.model(x), y)
        with torch.no_grad():
            sync.model(ONES)
        loss.backward()
        sync.step()
    return [weights(model)]


def forward_without_backward(loop: Loop) -> Results:
    """A forward pass with gradients enabled, whose output is not used."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        sync.model(ONES)
        loss_of(sync.model(x), y).backward()
        sync.step()
    return [weights(model)]


def agreed_between_steps(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    outputs = []
    with sync.agreed() as agreed:  # Before the first step.
        outputs.append(agreed(ONES))
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        with sync.agreed() as agreed, sync.agreed() as same, torch.no_grad():
            assert agreed is same is model
            outputs.append(agreed(ONES))
    return [weights(model), *outputs]


def agreed_between_forward_and_backward(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss = loss_of(sync.model(x), y)
        with sync.agreed():
            pass
        loss.backward()
        with sync.agreed():
            pass
        sync.step()
    return [weights(model)]


def error_inside_agreed(loop: Loop) -> Results:
    model = make_model(with_batchnorm)
    sync = loop.attach(model, bn="sync")
    train(loop, sync, 2)
    with pytest.raises(ZeroDivisionError), sync.agreed():
        raise ZeroDivisionError
    train(loop, sync, 2, start=2)
    return [weights(model)]


def layers_in_evaluation_mode(loop: Loop) -> Results:
    """Fine-tuning keeps BatchNorm layers in evaluation mode."""
    model = make_model(with_batchnorm)
    sync = loop.attach(model)
    model.train()
    model[1].eval()
    train(loop, sync)
    return [weights(model), model[1].running_mean]


def batchnorm_over_the_global_batch(loop: Loop) -> Results:
    model = make_model(with_batchnorm)
    sync = loop.attach(model, bn="sync")
    train(loop, sync)
    model.eval()
    return [weights(model), model[1].running_mean, model[1].running_var, model(ONES)]


def batchnorm_without_running_statistics(loop: Loop) -> Results:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False, affine=False), nn.Linear(8, 3)
        )

    model = make_model(build)
    train(loop, loop.attach(model, bn="sync"))
    return [weights(model)]


def other_norms(loop: Loop) -> Results:
    """Norms over a sample need no other rank."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), nn.Linear(8, 3))

    model = make_model(build)
    train(loop, loop.attach(model))
    return [weights(model)]


def buffers_by_hand(loop: Loop) -> Results:
    """A buffer that the loop itself updates, the same on every rank."""
    model = make_model(WithScale)
    sync = loop.attach(model)
    for step, (x, y) in enumerate(loop.batches()):
        loss_of(sync.model(x), y).backward()
        sync.step()
        model.scale.fill_(1 + step)
        model.count += 1
    return [weights(model), model.scale, model.count]


class WithScale(nn.Module):
    """Model with a buffer of floating-point numbers, and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the output."""
        return self.linear(x) * self.scale


def average_of_a_model_with_batchnorm(loop: Loop) -> Results:
    """An average of weights and buffers is kept, and the model is copied, in each mode of BatchNorm."""
    model = make_model(with_batchnorm)
    sync = loop.attach(model, bn="sync")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        average.update_parameters(model)
    average.eval()
    kept = copy.deepcopy(model).eval()
    return [weights(model), weights(average), average(ONES), kept(ONES)]


def copies_of_a_model_with_batchnorm(loop: Loop) -> Results:
    """Copies and files of the model have nothing of Paceline in them."""
    model = make_model(with_batchnorm)
    for bn in ("broadcast", "sync", "local"):
        sync = loop.attach(model, bn=bn)
        for make_copy in (copy.deepcopy, _through_a_file):
            other = make_copy(model)
            assert type(other[1]) is nn.BatchNorm1d
            assert vars(other[1]).keys() == vars(nn.BatchNorm1d(8)).keys()
            other.train()(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
        sync.detach()
        loop.attached.pop()
    sync = loop.attach(model, bn="sync")
    train(loop, sync)
    return [weights(model)]


def _through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


USAGES = [
    evaluation_on_the_bare_model,
    evaluation_on_sync_model,
    evaluation_on_one_rank,
    validation_loss_between_forward_and_backward,
    forward_without_backward,
    agreed_between_steps,
    agreed_between_forward_and_backward,
    error_inside_agreed,
    layers_in_evaluation_mode,
    batchnorm_over_the_global_batch,
    batchnorm_without_running_statistics,
    other_norms,
    buffers_by_hand,
    average_of_a_model_with_batchnorm,
    copies_of_a_model_with_batchnorm,
]


test_evaluation_and_modes_are_those_of_one_process, test_the_results_depend_on_synchronisation = usage_tests(
    USAGES,
    turn=3,
    # Under `none`, the weights inside `agreed` are rank 0's, so autograd refuses a backward pass that began before.
    without_synchronisation=[usage for usage in USAGES if usage is not agreed_between_forward_and_backward],
)
