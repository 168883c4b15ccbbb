"""Tests of weights outside the step: averages of weights, copies, loading, saving, changes by hand."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from training.usage.loops import Loop, Results, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(3)


def moving_average(loop: Loop) -> Results:
    """An average of the weights, updated after each step and evaluated."""
    model = make_model()
    sync = loop.attach(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    outputs = []
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        average.update_parameters(model)
        with torch.no_grad():
            outputs.append(average(torch.ones(1, 6, dtype=torch.float64)))
    return [weights(model), weights(average), torch.stack(outputs)]


def moving_average_by_hand(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.data, 0.5)
    return [weights(model), *average]


def average_of_state_dicts(loop: Loop) -> Results:
    model = make_model()
    sync = loop.attach(model)
    average = {key: value.clone() for key, value in model.state_dict().items()}
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        for key, value in model.state_dict().items():
            average[key].mul_(0.5).add_(value, alpha=0.5)
    return [weights(model), *average.values()]


def deep_copies(loop: Loop) -> Results:
    """A copy of the model in the middle of training keeps its weights, and can be trained alone."""
    model = make_model()
    sync = loop.attach(model)
    train(loop, sync, 2)
    kept = copy.deepcopy(model)
    train(loop, sync, 2, start=2)
    before = weights(kept)
    kept(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    return [weights(model), before, *(parameter.grad for parameter in kept.parameters())]


def saving(loop: Loop) -> Results:
    """Files that are written in the middle of training have the weights of the last step."""
    model = make_model()
    sync = loop.attach(model)
    found = []
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        for thing in (model.state_dict(), model):
            file = io.BytesIO()
            torch.save(thing, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            values = loaded.values() if isinstance(loaded, dict) else loaded.parameters()
            found.append(torch.cat([value.detach().reshape(-1) for value in values]))
    return [weights(model), *found]


def names_in_state_dicts(loop: Loop) -> Results:
    """`sync.model` may have other names than the model; the model's own are always the plain ones."""
    model = make_model()
    sync = loop.attach(model)
    train(loop, sync)
    with sync.agreed() as agreed:
        assert list(agreed.state_dict()) == list(make_model().state_dict())
        return [weights(model), weights(agreed)]


def loading_weights(loop: Loop) -> Results:
    """The same weights are loaded on every rank, after `attach` and in the middle of training."""
    model, other = make_model(), make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    sync = loop.attach(model)
    model.load_state_dict(other.state_dict())
    train(loop, sync, 3)
    model.load_state_dict(other.state_dict())
    train(loop, sync, 2, start=3)
    return [weights(model)]


def changes_by_hand(loop: Loop) -> Results:
    """Weights are clamped and scaled after each step, the same on every rank."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
            model[2].weight.div_(model[2].weight.norm())
    return [weights(model)]


def changes_through_data(loop: Loop) -> Results:
    """`.data` is the habit of older code."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        model[0].weight.data = model[0].weight.data * 0.9
    return [weights(model)]


def pruning(loop: Loop) -> Results:
    model = make_model()
    prune.random_unstructured(model[2], "weight", amount=0.5)
    sync = loop.attach(model)
    train(loop, sync)
    return [weights(model), model[2].weight]


def parametrised_weights(loop: Loop) -> Results:
    def build() -> nn.Module:
        return nn.Sequential(
            weight_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)
        )

    model = make_model(build)
    train(loop, loop.attach(model))
    return [weights(model), model[0].weight, model[2].weight]


def orthogonal_weights(loop: Loop) -> Results:
    model = make_model(lambda: nn.Sequential(orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)))
    train(loop, loop.attach(model))
    return [weights(model), model[0].weight]


def old_spectral_norm(loop: Loop) -> Results:
    """The older function, which computes the weight in a hook before forward."""
    model = make_model(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3)))
    train(loop, loop.attach(model))
    return [weights(model)]


def initialisation_after_attach(loop: Loop) -> Results:
    """Weights that are drawn after `attach` with the same seed on every rank."""
    model = make_model()
    sync = loop.attach(model)
    torch.manual_seed(7)
    for layer in (model[0], model[2], model[4]):
        nn.init.xavier_uniform_(layer.weight)
    train(loop, sync)
    return [weights(model)]


def functional_call(loop: Loop) -> Results:
    """The model is called with other weights in between."""
    model = make_model()
    sync = loop.attach(model)
    outputs = []
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        halved = {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}
        with torch.no_grad():
            outputs.append(torch.func.functional_call(model, halved, torch.ones(1, 6, dtype=torch.float64)))
    return [weights(model), *outputs]


def flat_vector(loop: Loop) -> Results:
    """The weights are read and written as one vector."""
    model = make_model()
    sync = loop.attach(model)
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step()
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, model.parameters())
    return [weights(model)]


def norms_of_weights(loop: Loop) -> Results:
    """The norm of the weights is logged after each step, and added to the loss."""
    model = make_model()
    sync = loop.attach(model)
    norms = []
    for x, y in loop.batches():
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        (loss_of(sync.model(x), y) + 0.01 * penalty).backward()
        sync.step()
        norms.append(torch.stack([parameter.detach().norm() for parameter in model.parameters()]))
    return [weights(model), *norms]


USAGES = [
    moving_average,
    moving_average_by_hand,
    average_of_state_dicts,
    deep_copies,
    saving,
    names_in_state_dicts,
    loading_weights,
    changes_by_hand,
    changes_through_data,
    pruning,
    parametrised_weights,
    orthogonal_weights,
    old_spectral_norm,
    initialisation_after_attach,
    functional_call,
    flat_vector,
    norms_of_weights,
]


test_weights_are_those_of_one_process, test_the_results_depend_on_synchronisation = usage_tests(USAGES, turn=11)
