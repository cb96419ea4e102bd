"""EfficientNet-Lite0 as a vision tower: the convolutional network without its classifier, batch norms folded into the
convolutions.

Architecture: Tan and Le, "EfficientNet" (ICML 2019), Table 1 (B0), in the Lite variant published with it: no
squeeze-and-excitation,
ReLU6 in place of swish. Padding is TensorFlow's "SAME": the odd pixel of a strided convolution goes to the right and
the bottom.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dream_ext import compat

# (repeats, kernel, first stride, expansion, channels out) of each stage, Table 1 of the paper.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM_CHANNELS = 32
BATCH_NORM_EPS = 1e-3


class EfficientNetLite0Config(compat.PreTrainedConfig):
    """``hidden_size``: channels of the last feature map; ``image_size``: side of the square input in pixels;
    ``global_share``: the part (of the variance) that the picture's mean feature takes in every visual token."""

    model_type = "efficientnet_lite0"
    hidden_size: int = 1280
    image_size: int = 448
    patch_size: int = 32
    num_hidden_layers: int = 1
    global_share: float = 0.0


class SameConv(nn.Conv2d):
    """Convolution with bias and TensorFlow "SAME" padding; groups = channels makes it depthwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stride, kernel = self.stride[0], self.kernel_size[0]
        high, wide = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:])
        if high or wide:
            x = F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
        return super().forward(x)


class InvertedResidual(nn.Module):
    """Expand (1 x 1), depthwise, project (1 x 1, linear), with a skip connection where the shapes agree."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int, stride: int, expansion: int):
        super().__init__()
        wide = channels_in * expansion
        self.expand = SameConv(channels_in, wide, 1) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride, groups=wide)
        self.project = SameConv(wide, channels_out, 1)
        self.skip = stride == 1 and channels_in == channels_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.skip else y


class EfficientNetLite0(PreTrainedModel):
    """pixel_values (B, 3, S, S), normalised by (x - 127) / 128 -> one visual token of 1280 per 32 x 32 pixels, row by
    row.

    Tokens are layer-normalised without weights, so that a projector sees features of unit variance. The mean feature is
    what the ImageNet classifier was trained on; mixed into every token it tells what the picture shows as a whole.
    """

    config_class = EfficientNetLite0Config
    main_input_name = "pixel_values"
    base_model_prefix = "vision"
    _no_split_modules = ("InvertedResidual",)

    def __init__(self, config: EfficientNetLite0Config):
        super().__init__(config)
        self.stem = SameConv(3, STEM_CHANNELS, 3, 2)
        blocks, channels = [], STEM_CHANNELS
        for repeats, kernel, stride, expansion, out in STAGES:
            for repeat in range(repeats):
                blocks.append(InvertedResidual(channels, out, kernel, stride if repeat == 0 else 1, expansion))
                channels = out
        self.blocks = nn.ModuleList(blocks)
        self.head = SameConv(channels, config.hidden_size, 1)
        self.post_init()

    def feature_map(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """pixel_values (B, 3, S, S) -> features (B, 1280, S / 32, S / 32), not normalised (what the ImageNet
        classifier averages)."""
        x = F.relu6(self.stem(pixel_values))
        for block in self.blocks:
            x = block(x)
        return F.relu6(self.head(x))

    def forward(
        self, pixel_values: torch.Tensor, output_hidden_states: bool | None = None, return_dict: bool | None = None, **_
    ):
        tokens = self.feature_map(pixel_values).flatten(2).transpose(1, 2)
        share, size = self.config.global_share, tokens.shape[-1:]
        local, whole = F.layer_norm(tokens, size), F.layer_norm(tokens.mean(1, keepdim=True), size)
        tokens = (1 - share) ** 0.5 * local + share**0.5 * whole
        output = BaseModelOutputWithPooling(
            last_hidden_state=tokens,
            pooler_output=tokens.mean(1),
            hidden_states=(tokens,) if output_hidden_states else None,
        )
        return output if return_dict is not False else output.to_tuple()


def convert_state(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """State of the published checkpoint (convolutions and batch norms apart) -> state of :class:`EfficientNetLite0`,
    norms folded.

    Raises ``ValueError`` if the checkpoint has tensors this network does not know.
    """
    state: dict[str, torch.Tensor] = {}
    left = {name for name in source if not name.endswith("num_batches_tracked") and not name.startswith("_fc.")}

    def fold(conv: str, norm: str, name: str) -> None:
        weight, gamma, beta, mean, variance = (source[key] for key in _fold_keys(conv, norm))
        left.difference_update(_fold_keys(conv, norm))
        scale = gamma / (variance + BATCH_NORM_EPS).sqrt()
        state[name + ".weight"] = weight * scale[:, None, None, None]
        state[name + ".bias"] = beta - mean * scale

    fold("_conv_stem", "_bn0", "stem")
    for index in range(sum(stage[0] for stage in STAGES)):
        old, new = f"_blocks.{index}.", f"blocks.{index}."
        if old + "_expand_conv.weight" in source:
            fold(old + "_expand_conv", old + "_bn0", new + "expand")
        fold(old + "_depthwise_conv", old + "_bn1", new + "depthwise")
        fold(old + "_project_conv", old + "_bn2", new + "project")
    fold("_conv_head", "_bn1", "head")
    if left:
        raise ValueError(f"unknown tensors in the EfficientNet-Lite0 checkpoint: {sorted(left)[:4]}")
    return state


def _fold_keys(conv: str, norm: str) -> list[str]:
    return [conv + ".weight"] + [f"{norm}.{part}" for part in ("weight", "bias", "running_mean", "running_var")]


AutoConfig.register("efficientnet_lite0", EfficientNetLite0Config, exist_ok=True)
AutoModel.register(EfficientNetLite0Config, EfficientNetLite0, exist_ok=True)
compat.register_tokenizers(EfficientNetLite0Config)
