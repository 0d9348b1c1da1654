"""The model as anyone would write it in torch, without the ops of this package: the baseline."""

import torch
import torch.nn.functional as F


class PlainModel(torch.nn.Module):
    """`Cherimoya` in standard torch operators (native Conv1d, Linear, GELU), same weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence (N, 4, L) to profile logits and log counts; no controls."""
        m = self.model
        h = F.gelu(m.iconv(sequence), approximate="tanh").transpose(1, 2)
        for block in m.blocks:
            weight = block.conv.conv_weight.t().unsqueeze(1)
            y = F.conv1d(
                h.transpose(1, 2),
                weight,
                padding=block.dilation,
                dilation=block.dilation,
                groups=h.shape[2],
            ).transpose(1, 2)
            flat = y.flatten(1)
            mean = flat.mean(1)[:, None, None]
            variance = flat.var(1, unbiased=False)[:, None, None]
            z = (y - mean) / torch.sqrt(variance + 1e-3)
            hidden = F.gelu(block.linear1(z), approximate="tanh")
            h = h + block.residual_scale * block.linear2(hidden)
        channels = h.transpose(1, 2)
        kept = slice(m.trimming, channels.shape[2] - m.trimming)
        return m.fconv(channels)[:, :, kept], m.linear(channels[:, :, kept].mean(2))


def export_plain(model: torch.nn.Module, length: int) -> bytes:
    """The baseline's ONNX file, as `torch.onnx.export` makes it with its defaults (opset 20)."""
    shortest = 2 * model.trimming + 1
    program = torch.onnx.export(
        PlainModel(model).eval(),
        (torch.zeros(2, 4, length),),
        dynamo=True,
        opset_version=20,
        input_names=["sequence"],
        output_names=["profile_logits", "log_counts"],
        dynamic_shapes=({0: torch.export.Dim("N"), 2: torch.export.Dim("L", min=shortest)},),
        verbose=False,
    )
    return program.model_proto.SerializeToString()
