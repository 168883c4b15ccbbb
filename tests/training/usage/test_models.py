"""Tests of unusual models: several in one, data types, memory layouts, sizes, precision, calls with several values."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from training.usage.loops import STEPS, Loop, Results, loss_of, make_model, train, usage_tests, weights

pytestmark = pytest.mark.takes(5)


class Pair(nn.Module):
    """Wrapper of two models that are trained together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Encode and decode."""
        return self.decoder(torch.tanh(self.encoder(x)))


def wrapper_of_two_models(loop: Loop) -> Results:
    model = make_model(Pair)
    sync = loop.attach(model)
    for x, _ in loop.batches():
        loss_of(sync.model(x), x).backward()
        sync.step()
    return [weights(model)]


def two_models_two_syncs(loop: Loop) -> Results:
    """A GAN: two models, each with its own optimiser, trained in turn on one process group."""
    generator, judge = (
        make_model(lambda: nn.Linear(6, 3)),
        make_model(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))),
    )
    of_generator = loop.attach(generator)
    of_judge = loop.attach(judge, lambda named: torch.optim.Adam(named, lr=0.01))
    for x, y in loop.batches():
        fake = of_generator.model(x).detach()
        (of_judge.model(fake).mean() - of_judge.model(y).mean()).backward()
        of_judge.step()
        judge.requires_grad_(False)
        (-judge(of_generator.model(x))).mean().backward()
        judge.requires_grad_(True)
        of_generator.step()
    return [weights(generator), weights(judge)]


def two_optimizers_of_one_model(loop: Loop) -> Results:
    """Each half of a model has its own `Sync`, and so its own optimiser."""
    model = make_model(Pair)
    of_encoder = loop.attach(model.encoder, lambda named: torch.optim.SGD(named, lr=0.1))
    of_decoder = loop.attach(model.decoder, lambda named: torch.optim.Adam(named, lr=0.01))
    for x, _ in loop.batches():
        loss_of(of_decoder.model(torch.tanh(of_encoder.model(x))), x).backward()
        of_encoder.step()
        of_decoder.step()
    return [weights(model)]


class OddShapes(nn.Module):
    """Model with a scalar parameter, an empty one and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Use all of them."""
        return self.linear(x) * self.scale + self.empty.sum()


def scalar_and_empty_parameters(loop: Loop) -> Results:
    model = make_model(OddShapes)
    train(loop, loop.attach(model))
    return [weights(model)]


def transposed_parameters(loop: Loop) -> Results:
    """A weight whose memory is transposed."""
    model = make_model()
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    train(loop, loop.attach(model))
    return [weights(model)]


def channels_last(loop: Loop) -> Results:
    build = lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(16, 3))  # noqa: E731
    model = make_model(build).to(memory_format=torch.channels_last)
    sync = loop.attach(model)
    for step, (_, y) in enumerate(loop.batches()):
        generator = torch.Generator().manual_seed(step)
        images = loop.share(torch.randn(8, 2, 5, 5, generator=generator, dtype=torch.float64))
        loss_of(sync.model(images.to(memory_format=torch.channels_last)), y).backward()
        sync.step()
    return [weights(model)]


class Spectral(nn.Module):
    """Model with complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Filter the frequencies of the input."""
        return self.linear(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


def complex_parameters(loop: Loop) -> Results:
    torch.manual_seed(0)
    model = Spectral()
    model.linear.double()
    train(loop, loop.attach(model))
    return [torch.view_as_real(model.filter.detach()), weights(model.linear)]


def clipping_of_complex_parameters(loop: Loop) -> Results:
    torch.manual_seed(0)
    model = Spectral()
    model.linear.double()
    sync = loop.attach(model, lambda named: torch.optim.SGD(named, lr=0.1))
    for x, y in loop.batches():
        loss_of(sync.model(x), y).backward()
        sync.step(max_norm=0.01)
    return [torch.view_as_real(model.filter.detach()), weights(model.linear)]


def mixed_types(loop: Loop) -> Results:
    """Layers of single and of double precision in one model."""
    model = make_model(MixedTypes)
    model.first.float()
    train(loop, loop.attach(model))
    return [weights(model.first), weights(model.last)]


class MixedTypes(nn.Module):
    """Model whose first layer may have another type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Convert between the types of the layers."""
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.last(hidden.to(self.last.weight.dtype))


def bfloat16_model(loop: Loop) -> Results:
    model = make_model().bfloat16()
    sync = loop.attach(model, lambda named: torch.optim.SGD(named, lr=0.1))
    for x, y in loop.batches(2):
        loss_of(sync.model(x.bfloat16()), y.bfloat16()).backward()
        sync.step()
    return [weights(model).double()]


def float16_model(loop: Loop) -> Results:
    model = make_model().half()
    sync = loop.attach(model, lambda named: torch.optim.SGD(named, lr=0.1))
    for x, y in loop.batches(2):
        loss_of(sync.model(x.half()), y.half()).backward()
        sync.step()
    return [weights(model).double()]


def autocast(loop: Loop) -> Results:
    model = make_model().float()
    sync = loop.attach(model)
    for x, y in loop.batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(sync.model(x.float()), y.float())
        loss.backward()
        sync.step()
    return [weights(model).double()]


class Structured(nn.Module):
    """Model that takes keyword arguments and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, *, features: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        """Return the output and the loss, as models of large libraries do."""
        output = self.linear(features)
        return {"output": output} if target is None else {"output": output, "loss": loss_of(output, target)}


def keyword_arguments_and_dictionaries(loop: Loop) -> Results:
    model = make_model(Structured)
    sync = loop.attach(model)
    for x, y in loop.batches():
        sync.model(features=x, target=y)["loss"].backward()
        sync.step()
    return [weights(model)]


def attention(loop: Loop) -> Results:
    model = make_model(lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True))
    sync = loop.attach(model)
    for x, _ in loop.batches():
        loss_of(sync.model(x.unsqueeze(1).expand(-1, 3, -1)), x.unsqueeze(1).expand(-1, 3, -1)).backward()
        sync.step()
    return [weights(model)]


def recurrent(loop: Loop) -> Results:
    model = make_model(lambda: nn.LSTM(6, 3, batch_first=True))
    sync = loop.attach(model)
    for x, y in loop.batches():
        output, _ = sync.model(x.unsqueeze(1))
        loss_of(output.squeeze(1), y).backward()
        sync.step()
    return [weights(model)]


def lazy_layers(loop: Loop) -> Results:
    """Lazy layers get their shape from a first call, before `attach`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(8, dtype=torch.float64), nn.Tanh(), nn.LazyLinear(3, dtype=torch.float64))
    model(torch.zeros(1, 6, dtype=torch.float64))
    train(loop, loop.attach(model))
    return [weights(model)]


def dropout(loop: Loop) -> Results:
    """Each part of a batch has its own random numbers, so ranks drop different units."""
    model = make_model(lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    sync = loop.attach(model)
    for step in range(STEPS):
        x, y = Loop().batches(1, step)[0]
        for part in loop.parts:
            torch.manual_seed(10 * step + part)
            with nullcontext() if part == loop.parts[-1] else sync.accumulate():
                (loss_of(sync.model(x[part::2]), y[part::2]) / len(loop.parts)).backward()
        sync.step()
    return [weights(model)]


TOLERANCES = {bfloat16_model: 0.02, float16_model: 2e-3, autocast: 0.02, mixed_types: 1e-6}
USAGES = [
    wrapper_of_two_models,
    two_models_two_syncs,
    two_optimizers_of_one_model,
    scalar_and_empty_parameters,
    transposed_parameters,
    channels_last,
    complex_parameters,
    clipping_of_complex_parameters,
    mixed_types,
    bfloat16_model,
    float16_model,
    autocast,
    keyword_arguments_and_dictionaries,
    attention,
    recurrent,
    lazy_layers,
    dropout,
]


test_models_train_as_in_one_process, test_the_results_depend_on_synchronisation = usage_tests(
    USAGES, turn=7, tolerances=TOLERANCES
)
