"""Set of labelled images, kept as bytes, and its batches: gathered, cropped, flipped, normalised.

All operations run on the device of the images and on a whole batch at once. Augmentation is keyed by (seed, epoch,
sample index), so a sample looks the same in any batch, at any position, on any number of ranks.

Median µs per batch of 3x32x32 out of 50,000, float32, one thread of a shared 2-core x86-64 CPU, torch 2.13, n = 300:

    batch                                                            16      64     256
    naive: (images[indices].float() / 255 - mean) / std              58     207     865
    this, not augmented                                              20      55     168
    naive crop (unfold windows) and flip (where)                    205     960   4,100
    this, cropped and flipped                                       123     231     635
    this, cropped and flipped, channels last                        160     319     935
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from paceline.workloads.data.sample_random import draw_below

CUTOUT_SEED, FLIP_SEED = 1 << 41, 1 << 42
"""Added to the seed of a run, which is less, so that cuts and alternating flips do not depend on the crop."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSet:
    """Labelled images of one shape, with their augmentation and normalisation."""

    name: str
    """Name of the data set, as users write it."""
    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], each in [0, classes)."""
    classes: int
    """Number of classes."""
    mean: tuple[float, ...]
    """Mean of each channel, of pixels scaled to 0..1."""
    std: tuple[float, ...]
    """Standard deviation of each channel, of pixels scaled to 0..1."""
    crop_padding: int = 0
    """Train on random crops of the image, padded with this many pixels on every side; 0: no crops."""
    padding_mode: Literal["constant", "reflect"] = "constant"
    """Padding: zeros, or the pixels of the image, reflected at its edge."""
    flip: bool = False
    """Train on images that are mirrored left to right with probability 1/2."""
    alternate_flip: bool = False
    """Mirror an image in every other epoch, not at random: half of the images in the first epoch, the others in the
    second. So two epochs have both sides of every image (Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU",
    2024)."""
    cutout: int = 0
    """Train on images in which a square of this many pixels a side, at a random place, has the mean colour; 0: none."""

    def __post_init__(self) -> None:
        assert self.images.dtype == torch.uint8, "images are uint8"
        assert self.images.ndim == 4, "images are [N, C, H, W]"
        assert self.images.is_contiguous(), "images are gathered as whole rows"
        assert self.labels.dtype == torch.int64, "labels are int64"
        assert self.labels.shape == self.images.shape[:1], "there is one label per image"
        assert len(self.mean) == len(self.std) == self.images.shape[1], "mean and std are per channel"
        if self.padding_mode == "reflect":
            assert self.crop_padding < min(self.images.shape[2:]), "an edge reflects fewer pixels than the image has"

    def __len__(self) -> int:
        return self.images.shape[0]

    def to(self, device: torch.device | str) -> ImageSet:
        """Return the set with its images and labels on `device`."""
        return dataclasses.replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def batch(
        self,
        indices: Tensor,
        *,
        seed: int,
        epoch: int | None,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the images of `indices`, ready for a model, and their labels; not augmented if `epoch` is None."""
        indices = indices.to(self.images.device, non_blocking=True)
        pixels = self.images.index_select(0, indices)
        if epoch is not None and (self.crop_padding or self.flip) and len(indices):
            pixels = self._augment(pixels, self._choices(indices, seed, epoch))
        if epoch is not None and self.cutout and len(indices):
            pixels = self._cut_out(
                pixels, draw_below(pixels[0, 0].numel(), indices, seed=seed + CUTOUT_SEED, epoch=epoch)
            )
        return self._normalise(pixels, dtype, channels_last), self.labels.index_select(0, indices)

    def _choices(self, indices: Tensor, seed: int, epoch: int) -> Tensor:
        """Return the number of the crop of each sample, among those of the image and then of its mirror image."""
        if not (self.flip and self.alternate_flip):
            return draw_below(len(self._crop_starts), indices, seed=seed, epoch=epoch)
        places = len(self._crop_starts) // 2
        is_mirrored = (draw_below(2, indices, seed=seed + FLIP_SEED, epoch=0) + epoch) % 2
        return draw_below(places, indices, seed=seed, epoch=epoch) + places * is_mirrored

    def _augment(self, pixels: Tensor, choices: Tensor) -> Tensor:
        """Mirror half of the images, then crop each at its own offset.

        A crop consists of C x H pieces of W neighbouring bytes. In the padded batch, viewed as one line of bytes, a
        piece starts at every offset, and a single `index_select` copies the needed ones: four times as fast as indexing
        2-D windows, and twenty times as fast as indexing pixels. Mirrored images are a second plane to select from:
        mirroring all of them takes less time than `where` on bytes.
        """
        count, channels, height, width = pixels.shape
        pad = self.crop_padding
        canvas = pixels.new_zeros(count, 1 + self.flip, channels, height + 2 * pad, width + 2 * pad)
        if pad and self.padding_mode == "reflect":
            rows, columns = self._reflected
            pixels, inner = pixels[:, :, rows][..., columns], canvas
        else:
            inner = canvas.narrow(3, pad, height).narrow(4, pad, width)
        inner.select(1, 0).copy_(pixels)
        if self.flip:
            inner.select(1, 1).copy_(pixels.flip(3))
        starts = self._crop_starts.index_select(0, choices)
        starts += torch.arange(0, canvas.numel(), canvas.stride(0), device=pixels.device)
        pieces = (starts[:, None] + self._piece_offsets).view(-1)
        return canvas.view(-1).unfold(0, width, 1).index_select(0, pieces).view(count, channels, height, width)

    def _cut_out(self, pixels: Tensor, centres: Tensor) -> Tensor:
        """Fill a square around each centre, as far as it is inside the image, with the mean colour.

        DeVries and Taylor, "Improved regularization of convolutional neural networks with cutout", 2017.
        """
        _, _, height, width = pixels.shape
        first = self.cutout // 2
        rows, columns = (torch.arange(size, device=pixels.device) + first for size in (height, width))
        from_row = rows - (centres // width)[:, None]
        from_column = columns - (centres % width)[:, None]
        in_rows = (from_row >= 0) & (from_row < self.cutout)
        in_columns = (from_column >= 0) & (from_column < self.cutout)
        square = in_rows[:, None, :, None] & in_columns[:, None, None, :]
        return torch.where(square, self._mean_bytes, pixels)

    @cached_property
    def _mean_bytes(self) -> Tensor:
        bytes_of_mean = [round(255 * mean) for mean in self.mean]
        return torch.tensor(bytes_of_mean, dtype=torch.uint8, device=self.images.device).view(1, -1, 1, 1)

    def _normalise(self, pixels: Tensor, dtype: torch.dtype, channels_last: bool) -> Tensor:
        """Scale bytes to mean 0 and standard deviation 1, in float32 if `dtype` is narrower.

        Two in-place passes are faster here than `addcmul` and `batch_norm`, which allocate their result. A product that
        is rounded before the addition, not fused with it, is the same to the last bit on every device.
        """
        wide = torch.promote_types(dtype, torch.float32)
        if not channels_last:
            return pixels.to(wide).mul_(self._scale).add_(self._shift).to(dtype)
        # Channels are interleaved while they are bytes, which moves a quarter of the data, and scaled as rows of W*C
        # values: a last dimension of 3 would not fill vector instructions.
        count, channels, height, width = pixels.shape
        rows = torch.stack(pixels.unbind(1), dim=-1).view(count, height, width * channels)
        scale, shift = self._interleaved
        normal = rows.to(wide).mul_(scale).add_(shift).to(dtype)
        return normal.view(count, height, width, channels).permute(0, 3, 1, 2)

    @cached_property
    def _scale(self) -> Tensor:
        return self._per_channel([1 / (255 * std) for std in self.std])

    @cached_property
    def _shift(self) -> Tensor:
        return self._per_channel([-mean / std for mean, std in zip(self.mean, self.std, strict=True)])

    def _per_channel(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.images.device).view(1, -1, 1, 1)

    @cached_property
    def _interleaved(self) -> tuple[Tensor, Tensor]:
        """Scale and shift for one row of interleaved channels."""
        width = self.images.shape[3]
        return self._scale.flatten().repeat(width), self._shift.flatten().repeat(width)

    @cached_property
    def _crop_starts(self) -> Tensor:
        """Offset of a crop's first byte in an image's canvas, for every mirroring, row and column."""
        (plane, _, row, column), pad = self._canvas_strides, self.crop_padding
        steps = torch.arange(2 * pad + 1, device=self.images.device)
        mirrored = torch.arange(1 + self.flip, device=self.images.device)
        return (mirrored[:, None, None] * plane + steps[:, None] * row + steps * column).view(-1)

    @cached_property
    def _reflected(self) -> tuple[Tensor, Tensor]:
        """Row and column of the image for each row and column of the padded image, which is reflected at the edges."""
        sizes, pad = self.images.shape[2:], self.crop_padding
        rows, columns = (
            (size - 1 - (size - 1 - torch.arange(-pad, size + pad, device=self.images.device).abs()).abs())
            for size in sizes
        )
        return rows, columns

    @cached_property
    def _piece_offsets(self) -> Tensor:
        """Offset of each of a crop's C x H pieces from the crop's first byte."""
        (_, channel, row, _), (_, channels, height, _) = self._canvas_strides, self.images.shape
        rows = torch.arange(height, device=self.images.device) * row
        return (torch.arange(channels, device=self.images.device)[:, None] * channel + rows).view(-1)

    @property
    def _canvas_strides(self) -> tuple[int, int, int, int]:
        """Bytes from one mirroring, channel, row and column of an image's canvas to the next."""
        _, channels, height, width = self.images.shape
        row = width + 2 * self.crop_padding
        channel = row * (height + 2 * self.crop_padding)
        return channels * channel, channel, row, 1
