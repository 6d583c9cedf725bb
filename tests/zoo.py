"""Networks that nobody here wrote, each in a LightningModule as its users write it; random weights, no download.

Each class of transformers is called with what its processor or tokenizer returns, ``labels`` included where the class
takes them, and returns a ``ModelOutput``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY, LENGTH, NUM_CLASSES, PAD = 29, 12, 5, 1
TEXT = "attention_mask", "input_ids"


@dataclass(frozen=True)
class Model:
    """Describe one model of the zoo.

    Attributes:
        make: returns its LightningModule.
        sample: returns one sample by its number.
        requires: the package that it is from.
        collate: of its DataLoader; None for torch's own, ``"graphs"`` for that of PyTorch Geometric.
        is_decoder: whether it generates text.
    """

    make: Callable[[], L.LightningModule]
    sample: Callable[[int], Any]
    requires: str = "torch"
    collate: str | None = None
    is_decoder: bool = False

    def loader(self, num_samples: int = 12, batch_size: int = 4) -> Any:
        samples = Samples(self.sample, num_samples)
        if self.collate == "graphs":
            from torch_geometric.loader import DataLoader as GraphLoader

            return GraphLoader(samples, batch_size)
        return DataLoader(samples, batch_size)


class Samples(Dataset[Any]):
    def __init__(self, sample: Callable[[int], Any], num_samples: int) -> None:
        self.sample, self.num_samples = sample, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if index >= self.num_samples:
            raise IndexError(index)
        return self.sample(index)


class Transformer(L.LightningModule):
    """Fine-tune a model of transformers on batches that are its keyword arguments, after Lightning's tutorial."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(**batch)[0]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        outputs = self(**batch)
        self.log("val_loss", outputs.loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Pooled(Transformer):
    """Classify by a linear layer on what a backbone of transformers returns, whose class takes no labels."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__(model)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, **inputs: Any) -> Tensor:
        result: Tensor = self.head(self.model(**inputs).pooler_output.flatten(1))
        return result

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        return F.cross_entropy(self(**batch), labels)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        labels = batch.pop("labels")
        self.log("val_loss", F.cross_entropy(self(**batch), labels), prog_bar=True)


class Contrastive(Transformer):
    """Train both towers of CLIP on pairs."""

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, return_loss=True)


class Supervised(L.LightningModule):
    """Train a network of torch on pairs of an input and a target."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor) -> Any:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(self(x), y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Audio(nn.Module):
    """Classify waveforms by gated, dilated and depthwise convolutions, as networks for audio do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 5, stride=2, padding=2)
        self.gated = nn.Conv1d(width, 2 * width, 3, padding=2, dilation=2)
        self.norm = nn.GroupNorm(2, width)
        self.depthwise = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv1d(width, 2 * width, 1)
        self.head = nn.Linear(2 * width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.glu(self.gated(F.relu(self.stem(x))), dim=1))
        x = F.relu(self.pointwise(self.depthwise(x)))
        result: Tensor = self.head(x.mean(-1))
        return result


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 16)) -> None:
        super().__init__()
        first, second = widths
        self.down = nn.Sequential(nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(first, second, 3, padding=1), nn.ReLU())
        self.upsample = nn.ConvTranspose2d(second, first, 2, stride=2)
        self.up = nn.Sequential(nn.Conv2d(2 * first, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU())
        self.head = nn.Conv2d(first, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        result: Tensor = self.head(self.up(torch.cat([skipped, self.upsample(self.middle(skipped))], 1)))
        return result


class Seq2Seq(nn.Module):
    """Translate sequences of tokens by an LSTM that reads and one that writes, given what it should have written."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = tokens.chunk(2, dim=1)
        _, state = self.encoder(self.source(source))
        result: Tensor = self.head(self.decoder(self.target(target), state)[0]).transpose(1, 2)
        return result


class Autoencoder(nn.Module):
    """Return a reconstruction, a mean and a logarithm of the variance, the last two as tensors of a tuple."""

    def __init__(self, width: int = 16, latent: int = 4, noise: float = 1.0) -> None:
        super().__init__()
        self.noise = noise
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 256))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        noise = self.noise if self.training else 0.0
        latent = mean + noise * torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance


def variational_loss(outputs: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    reconstruction, mean, log_variance = outputs
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return F.mse_loss(reconstruction, target.flatten(1)) + 0.01 * divergence


class Graphs(L.LightningModule):
    """Classify graphs by convolutions of PyTorch Geometric."""

    def __init__(self, kind: str, width: int = 8) -> None:
        super().__init__()
        from torch_geometric import nn as gnn

        def mlp(inputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))

        convolutions: dict[str, Callable[[int], nn.Module]] = {
            "gcn": lambda inputs: gnn.GCNConv(inputs, width),
            "gin": lambda inputs: gnn.GINConv(mlp(inputs)),
            "gat": lambda inputs: gnn.GATConv(inputs, width // 4, heads=4),
            "gps": lambda inputs: gnn.GPSConv(width, gnn.GINConv(mlp(width)), heads=2),
        }
        self.stem = nn.Linear(4, width) if kind == "gps" else nn.Identity()
        self.convolutions = nn.ModuleList([convolutions[kind](4), convolutions[kind](width)])
        self.head = nn.Linear(width, NUM_CLASSES)
        self.takes_batch = kind == "gps"

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = self.stem(x)
        for convolution in self.convolutions:
            x = F.relu(convolution(x, edge_index, batch) if self.takes_batch else convolution(x, edge_index))
        result: Tensor = self.head(global_mean_pool(x, batch))
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch.x, batch.edge_index, batch.batch), batch.y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def drawn(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(index)


def text(index: int, labels: str = "none") -> dict[str, Tensor]:
    """Return tokens of one padded sequence, with no labels, those of tokens, or one of the sequence."""
    generator = drawn(index)
    length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))
    tokens = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
    mask = (torch.arange(LENGTH) < length).long()
    sample = {"input_ids": torch.where(mask.bool(), tokens, PAD), "attention_mask": mask}
    if labels == "tokens":
        sample["labels"] = torch.where(mask.bool(), tokens, -100)
    elif labels == "sequence":
        sample["labels"] = tokens[0] % NUM_CLASSES
    elif labels == "tags":
        sample["labels"] = torch.where(mask.bool(), tokens % NUM_CLASSES, -100)
    return sample


def picture(index: int, size: int = 16, channels: int = 3) -> dict[str, Tensor]:
    values = torch.randn(channels, size, size, generator=drawn(index))
    return {"pixel_values": values, "labels": torch.tensor(index % NUM_CLASSES)}


def spectrogram(index: int) -> dict[str, Tensor]:
    labels = torch.randint(4, VOCABULARY, (6,), generator=drawn(index))
    return {"input_features": torch.randn(8, 2 * LENGTH, generator=drawn(index)), "labels": labels}


def pair(index: int) -> dict[str, Tensor]:
    return text(index) | {"pixel_values": picture(index)["pixel_values"]}


def plain_picture(index: int) -> tuple[Tensor, Tensor]:
    values = torch.randn(1, 16, 16, generator=drawn(index))
    return values, values


def masked_picture(index: int) -> tuple[Tensor, Tensor]:
    values = torch.randn(1, 16, 16, generator=drawn(index))
    return values, (values > 0).float()


def wave(index: int) -> tuple[Tensor, int]:
    return torch.randn(1, 64, generator=drawn(index)), index % NUM_CLASSES


def translation(index: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(4, VOCABULARY, (2 * LENGTH,), generator=drawn(index))
    return tokens, tokens[LENGTH:]


def graph(index: int) -> Any:
    from torch_geometric.data import Data

    num_nodes = 4 + index % 4
    edges = torch.randint(num_nodes, (2, 3 * num_nodes), generator=drawn(index))
    x = torch.randn(num_nodes, 4, generator=drawn(index))
    return Data(x=x, edge_index=edges, y=torch.tensor([index % NUM_CLASSES]))


_WIDTHS = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": 3}
_VISION = {"image_size": 16, "num_channels": 3, "num_labels": NUM_CLASSES}


def of_transformers(name: str, head: str, wrap: Callable[..., L.LightningModule] = Transformer, **config: Any) -> Any:
    """Return a function that makes a module with ``{name}{head}`` of transformers."""

    def make() -> L.LightningModule:
        transformers: Any = pytest.importorskip("transformers")
        options = {"num_labels": NUM_CLASSES, **config}
        return wrap(getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**options)))

    return make


def tokens(index: int) -> dict[str, Tensor]:
    return text(index, "tokens")


def sentence(index: int) -> dict[str, Tensor]:
    return text(index, "sequence")


def tags(index: int) -> dict[str, Tensor]:
    return text(index, "tags")


def clip() -> L.LightningModule:
    transformers: Any = pytest.importorskip("transformers")
    towers = {
        "text_config": {**_WIDTHS, **_TOKENS},
        "vision_config": {**_WIDTHS, "image_size": 16, "patch_size": 8},
    }
    return Contrastive(transformers.CLIPModel(transformers.CLIPConfig(**towers, projection_dim=8)))


_ENCODER = {**_WIDTHS, **_TOKENS}
_GROUPED = {**_ENCODER, "num_key_value_heads": 2}
_OF_TEXT = {"requires": "transformers", "sample": tokens, "is_decoder": True}
_OF_PICTURES = {"requires": "transformers", "sample": picture}
ZOO: dict[str, Model] = {
    "bert": Model(of_transformers("Bert", "ForSequenceClassification", **_ENCODER), sentence, "transformers"),
    "distilbert": Model(
        of_transformers(
            "DistilBert", "ForTokenClassification", vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=4,
            hidden_dim=24, max_position_embeddings=2 * LENGTH, pad_token_id=PAD,
        ),
        tags, "transformers",
    ),
    "roberta": Model(of_transformers("Roberta", "ForMaskedLM", **_ENCODER), tokens, "transformers"),
    "gpt2": Model(
        of_transformers(
            "GPT2", "LMHeadModel", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=2 * LENGTH,
            bos_token_id=2, eos_token_id=3,
        ),
        **_OF_TEXT,
    ),
    "llama": Model(of_transformers("Llama", "ForCausalLM", **_GROUPED), **_OF_TEXT),
    "mistral": Model(of_transformers("Mistral", "ForCausalLM", **_GROUPED, sliding_window=8), **_OF_TEXT),
    "qwen3": Model(of_transformers("Qwen3", "ForCausalLM", **_GROUPED, head_dim=4), **_OF_TEXT),
    "olmoe": Model(
        of_transformers(
            "Olmoe", "ForCausalLM", **_ENCODER | {"intermediate_size": 40}, num_experts=4, num_experts_per_tok=2
        ), **_OF_TEXT
    ),
    "t5": Model(
        of_transformers(
            "T5", "ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24, num_layers=2,
            num_heads=4, decoder_start_token_id=PAD, pad_token_id=PAD,
        ),
        **_OF_TEXT,
    ),
    "vit": Model(of_transformers("ViT", "ForImageClassification", **_WIDTHS, **_VISION, patch_size=8), **_OF_PICTURES),
    "clip": Model(clip, pair, "transformers"),
    "whisper": Model(
        of_transformers(
            "Whisper", "ForConditionalGeneration", vocab_size=VOCABULARY, num_mel_bins=8, d_model=16,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=LENGTH, max_target_positions=LENGTH,
            pad_token_id=PAD, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
            suppress_tokens=None, begin_suppress_tokens=None,
        ),
        spectrogram, "transformers",
    ),
    "resnet": Model(
        of_transformers(
            "ResNet", "ForImageClassification", num_channels=3, embedding_size=8, hidden_sizes=[8, 16],
            depths=[1, 1], layer_type="basic",
        ),
        **_OF_PICTURES,
    ),
    "resnet_bottleneck": Model(
        of_transformers(
            "ResNet", "ForImageClassification", num_channels=3, embedding_size=8, hidden_sizes=[16, 32],
            depths=[1, 2], layer_type="bottleneck",
        ),
        **_OF_PICTURES,
    ),
    "mobilenet": Model(
        of_transformers("MobileNetV2", "ForImageClassification", depth_multiplier=0.25, image_size=16),
        sample=lambda index: picture(index, 32), requires="transformers",
    ),
    "efficientnet": Model(
        of_transformers(
            "EfficientNet", "ForImageClassification", width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320,
            image_size=32,
        ),
        sample=lambda index: picture(index, 32), requires="transformers",
    ),
    "convnext": Model(
        of_transformers("ConvNext", "ForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        **_OF_PICTURES,
    ),
    "swin": Model(
        of_transformers(
            "Swin", "ForImageClassification", image_size=16, patch_size=2, embed_dim=8, depths=[1, 1],
            num_heads=[2, 2], window_size=4,
        ),
        **_OF_PICTURES,
    ),
    "unet": Model(lambda: Supervised(UNet(), F.binary_cross_entropy_with_logits), masked_picture),
    "audio": Model(lambda: Supervised(Audio(), F.cross_entropy), wave),
    "seq2seq": Model(lambda: Supervised(Seq2Seq(), F.cross_entropy), translation),
    "vae": Model(lambda: Supervised(Autoencoder(), variational_loss), plain_picture),
    **{
        kind: Model(lambda kind=kind: Graphs(kind), graph, "torch_geometric", collate="graphs")  # type: ignore[misc]
        for kind in ("gcn", "gin", "gat", "gps")
    },
}  # fmt: skip
