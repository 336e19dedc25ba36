"""Convolutional networks for image classification: a small one, and ResNets.

Batch normalisation normalises by the batch that a model is called with, and keeps no
running averages: a model's `nnx.BatchStat` are the statistics of the last batch, or of
those that it is given, and in evaluation mode (`model.eval()`) it normalises by them.

Shapes: B images, H rows, W columns, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Float

Architecture = Literal["small", "resnet18", "resnet50"]
"""The names of the networks."""

_SMALL = (32, 64, 128, 128)
"""Channels of the small network's convolutions."""

_RESNETS = {"resnet18": ((2, 2, 2, 2), (3, 3)), "resnet50": ((3, 4, 6, 3), (1, 3, 1))}
"""Blocks of each stage, and a side of each convolution's kernel in a block."""

EPSILON = 1e-5
"""Added to the variance in every batch normalisation."""


@dataclass(frozen=True)
class ConvolutionalConfig:
    """A network's name and the shape of what it classifies.

    Attributes:
      architecture: `small`: four convolutions of 32 to 128 channels. `resnet18`: of
        basic blocks, for images of about 32 pixels a side, with a first convolution of
        3 x 3 and no pooling. `resnet50`: of bottlenecks, for about 224 pixels, with a
        first convolution of 7 x 7 and pooling.
      num_classes: Classes.
      channels: Channels of an image.
      width: Channels of a ResNet's first stage; each stage after doubles them.
      dtype: Name of the dtype of the convolutions; parameters and statistics are
        float32.
    """

    architecture: Architecture = "small"
    num_classes: int = 10
    channels: int = 3
    width: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        if self.architecture not in get_args(Architecture):
            names = ", ".join(get_args(Architecture))
            raise ValueError(
                f"architecture is one of {names}, not {self.architecture!r}."
            )


class NormalisedConv(nnx.Module):
    """scale · (y - mean) / √(variance + ε) + bias of y, a convolution without bias.

    Mean and variance are a channel's over all images and places of the batch. Weights
    are He et al.'s (2015).

    Args:
      config: The network's.
      channels_in: Channels of its input.
      channels_out: Channels of its output.
      size: Pixels of a side of its kernel.
      stride: Pixels between the places that are computed.
      zero: Whether the scale begins at zero.
      rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        config: ConvolutionalConfig,
        channels_in: int,
        channels_out: int,
        size: int,
        stride: int = 1,
        *,
        zero: bool = False,
        rngs: nnx.Rngs,
    ):
        self.conv = nnx.Conv(
            channels_in,
            channels_out,
            (size, size),
            stride,
            padding=size // 2,
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )
        ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
        # Without momentum, what it keeps is the last batch's statistics alone.
        self.norm = nnx.BatchNorm(
            channels_out,
            momentum=0.0,
            epsilon=EPSILON,
            use_fast_variance=False,
            scale_init=zeros if zero else ones,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w c"]:
        """The normalised convolution, in the dtype of the convolution."""
        y = self.conv(x)
        return self.norm(y.astype(jnp.float32)).astype(y.dtype)


class ResidualBlock(nnx.Module):
    """relu(x + f(x)) of f, normalised convolutions with relu between them.

    The last scale of f begins at zero, so that the block begins as an identity (Goyal
    et al., 2017). Where f has a stride or other channels, a 1 x 1 convolution
    of x takes the place of x.

    Args:
      config: The network's.
      channels: Channels of its input, of each convolution's output in order.
      sizes: Pixels of a side of each convolution's kernel.
      stride: That of the first convolution larger than one pixel.
      rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        config: ConvolutionalConfig,
        channels: Sequence[int],
        sizes: Sequence[int],
        stride: int,
        *,
        rngs: nnx.Rngs,
    ):
        strided, last = sizes.index(3), len(sizes) - 1
        self.convs = nnx.List(
            NormalisedConv(
                config,
                channels[i],
                channels[i + 1],
                size,
                stride if i == strided else 1,
                zero=i == last,
                rngs=rngs,
            )
            for i, size in enumerate(sizes)
        )
        first, final = channels[0], channels[-1]
        changes = stride > 1 or first != final
        self.shortcut = (
            NormalisedConv(config, first, final, 1, stride, rngs=rngs)
            if changes
            else None
        )

    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w c"]:
        """relu(x + f(x))."""
        *before, last = self.convs
        y = x
        for conv in before:
            y = nnx.relu(conv(y))
        return nnx.relu(last(y) + (self.shortcut(x) if self.shortcut else x))


class SmallNet(nnx.Module):
    """Normalised convolutions with relu, their mean over places, and a dense layer.

    Args:
      config: The network's.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: ConvolutionalConfig, *, rngs: nnx.Rngs):
        channels = (config.channels, *_SMALL)
        self.convs = nnx.List(
            NormalisedConv(config, *pair, 3, 2 if i else 1, rngs=rngs)
            for i, pair in enumerate(pairwise(channels))
        )
        self.head = _head(config, channels[-1], rngs)

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B classes"]:
        """Logits, float32."""
        x = images.astype(self.head.dtype)
        for conv in self.convs:
            x = nnx.relu(conv(x))
        return _logits(self.head, x)


class ResNet(nnx.Module):
    """He et al.'s network (2016): four stages of blocks, each of half the size before.

    A bottleneck's stride is that of its 3 x 3 convolution, as in Goyal et al. (2017).

    Args:
      config: The network's.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: ConvolutionalConfig, *, rngs: nnx.Rngs):
        counts, sizes = _RESNETS[config.architecture]
        self.pools = config.architecture == "resnet50"
        size, stride = (7, 2) if self.pools else (3, 1)
        x = config.width
        self.stem = NormalisedConv(config, config.channels, x, size, stride, rngs=rngs)
        blocks = []
        for stage, count in enumerate(counts):
            inside = config.width * 2**stage
            after = inside * (4 if len(sizes) == 3 else 1)
            for i in range(count):
                channels = (x, *[inside] * (len(sizes) - 1), after)
                stride = 2 if stage and not i else 1
                blocks.append(ResidualBlock(config, channels, sizes, stride, rngs=rngs))
                x = after
        self.blocks = nnx.List(blocks)
        self.head = _head(config, x, rngs)

    def __call__(self, images: Float[Array, "B H W C"]) -> Float[Array, "B classes"]:
        """Logits, float32."""
        x = nnx.relu(self.stem(images.astype(self.head.dtype)))
        if self.pools:
            x = nnx.max_pool(x, (3, 3), (2, 2), "SAME")
        for block in self.blocks:
            x = block(x)
        return _logits(self.head, x)


def convolutional(config: ConvolutionalConfig, *, rngs: nnx.Rngs) -> SmallNet | ResNet:
    """The network that a configuration names.

    Args:
      config: The configuration.
      rngs: Source of the initial parameters.

    Returns:
      A module: from images, float32, (B, H, W, C), to logits.
    """
    network = SmallNet if config.architecture == "small" else ResNet
    return network(config, rngs=rngs)


def pooled_statistics(parts: Sequence[Any]) -> Any:
    """The statistics of several batches together (Wu and Johnson, 2021, section 3).

    mean = 1/K Σ meanₖ and variance = 1/K Σ (varianceₖ + meanₖ²) - mean².

    Args:
      parts: A network's `nnx.BatchStat` after each of K batches of one size, as nested
        dictionaries.

    Returns:
      A tree like each of them.

    Example:
      >>> import numpy as np
      >>> from models.convolutional import pooled_statistics
      >>> one, other = ({"mean": np.array(x), "var": np.array(1.0)} for x in (0.0, 2.0))
      >>> {name: float(x) for name, x in pooled_statistics([one, other]).items()}
      {'mean': 1.0, 'var': 2.0}
    """

    def is_statistics(node: Any) -> bool:
        return node.keys() == {"mean", "var"}

    def pool(*nodes: dict[str, Any]) -> dict[str, Any]:
        means, variances = (np.stack([n[x] for n in nodes]) for x in ("mean", "var"))
        return {"mean": means.mean(axis=0), "var": variances.mean(0) + means.var(0)}

    return jax.tree.map(pool, *parts, is_leaf=is_statistics)


def _head(config: ConvolutionalConfig, size: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        size,
        config.num_classes,
        kernel_init=nnx.initializers.normal(0.01),
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


def _logits(head: nnx.Linear, x: Float[Array, "B h w C"]) -> Float[Array, "B classes"]:
    return head(jnp.mean(x, axis=(1, 2))).astype(jnp.float32)
