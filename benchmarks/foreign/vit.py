"""A vision transformer on generated pictures of shapes, after Lightning's tutorial 11."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset

COLOURS = {
    "circle": (220, 60, 40), "square": (50, 90, 210), "triangle": (240, 210, 60),
    "cross": (60, 170, 80), "ring": (150, 60, 170), "bar": (240, 240, 240),
}  # fmt: skip
SHAPES = list(COLOURS)


def draw(shape, rng, size=32):
    """Return an RGB picture (H, W, 3) uint8 of one shape at a random place, of about its usual colour."""
    background = tuple(int(c) for c in rng.integers(0, 128, 3))
    colour = tuple(int(c) for c in np.clip(rng.normal(COLOURS[shape], 25), 0, 255))
    image = Image.new("RGB", (size, size), background)
    pen = ImageDraw.Draw(image)
    r = int(rng.integers(5, 11))
    x, y = (int(c) for c in rng.integers(r, size - r, 2))
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif shape == "cross":
        pen.line((x - r, y, x + r, y), fill=colour, width=3)
        pen.line((x, y - r, x, y + r), fill=colour, width=3)
    elif shape == "ring":
        pen.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=2)
    else:
        pen.rectangle((x - r, y - 2, x + r, y + 2), fill=colour)
    noise = rng.normal(0, 12, (size, size, 3))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)


class ShapesDataset(Dataset):
    """Pictures in memory, converted and flipped as they are drawn."""

    def __init__(self, num_samples, seed, train=False):
        rng = np.random.default_rng(seed)
        self.targets = rng.integers(0, len(SHAPES), num_samples)
        self.images = [draw(SHAPES[target], rng) for target in self.targets]
        self.train = train
        self.mean, self.std = torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1), torch.tensor([0.29] * 3).view(3, 1, 1)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, idx):
        image = torch.from_numpy(self.images[idx]).permute(2, 0, 1).float().div(255)
        if self.train and torch.rand(1) < 0.5:
            image = image.flip(-1)
        return (image - self.mean) / self.std, int(self.targets[idx])


def img_to_patch(x, patch_size, flatten_channels=True):
    B, C, H, W = x.shape
    x = x.reshape(B, C, H // patch_size, patch_size, W // patch_size, patch_size)
    x = x.permute(0, 2, 4, 1, 3, 5)  # [B, H', W', C, p_H, p_W]
    x = x.flatten(1, 2)  # [B, H'*W', C, p_H, p_W]
    return x.flatten(2, 4) if flatten_channels else x


class AttentionBlock(nn.Module):
    def __init__(self, embed_dim, hidden_dim, num_heads, dropout=0.0):
        super().__init__()
        self.layer_norm_1 = nn.LayerNorm(embed_dim)
        self.attn = nn.MultiheadAttention(embed_dim, num_heads)
        self.layer_norm_2 = nn.LayerNorm(embed_dim)
        self.linear = nn.Sequential(
            nn.Linear(embed_dim, hidden_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, embed_dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        inp_x = self.layer_norm_1(x)
        x = x + self.attn(inp_x, inp_x, inp_x)[0]
        return x + self.linear(self.layer_norm_2(x))


class VisionTransformer(nn.Module):
    def __init__(
        self, embed_dim, hidden_dim, num_channels, num_heads, num_layers, num_classes, patch_size, num_patches, dropout
    ):
        super().__init__()
        self.patch_size = patch_size
        self.input_layer = nn.Linear(num_channels * (patch_size**2), embed_dim)
        self.transformer = nn.Sequential(
            *(AttentionBlock(embed_dim, hidden_dim, num_heads, dropout=dropout) for _ in range(num_layers))
        )
        self.mlp_head = nn.Sequential(nn.LayerNorm(embed_dim), nn.Linear(embed_dim, num_classes))
        self.dropout = nn.Dropout(dropout)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, 1 + num_patches, embed_dim))

    def forward(self, x):
        x = img_to_patch(x, self.patch_size)
        B, T, _ = x.shape
        x = self.input_layer(x)
        cls_token = self.cls_token.repeat(B, 1, 1)
        x = torch.cat([cls_token, x], dim=1)
        x = x + self.pos_embedding[:, : T + 1]
        x = self.dropout(x)
        x = x.transpose(0, 1)
        x = self.transformer(x)
        return self.mlp_head(x[0])


class ViTClassifier(L.LightningModule):
    def __init__(self, lr: float = 3e-4, embed_dim: int = 128, num_layers: int = 4, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(
            embed_dim=embed_dim,
            hidden_dim=2 * embed_dim,
            num_channels=3,
            num_heads=8,
            num_layers=num_layers,
            num_classes=len(SHAPES),
            patch_size=4,
            num_patches=64,
            dropout=dropout,
        )

    def forward(self, x):
        return self.model(x)

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameters(), lr=self.hparams.lr)
        lr_scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[100, 150], gamma=0.1)
        return [optimizer], [lr_scheduler]

    def _calculate_loss(self, batch, mode="train"):
        imgs, labels = batch
        preds = self.model(imgs)
        loss = F.cross_entropy(preds, labels)
        acc = (preds.argmax(dim=-1) == labels).float().mean()
        self.log(f"{mode}_loss", loss)
        self.log(f"{mode}_acc", acc)
        return loss

    def training_step(self, batch, batch_idx):
        return self._calculate_loss(batch, mode="train")

    def validation_step(self, batch, batch_idx):
        self._calculate_loss(batch, mode="val")


class ShapesDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 64, num_samples: int = 3200):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        self.train_set = ShapesDataset(self.hparams.num_samples, seed=0, train=True)
        self.val_set = ShapesDataset(640, seed=1)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 10} | trainer_options)
    return trainer, ViTClassifier(), ShapesDataModule()


if __name__ == "__main__":
    L.seed_everything(42)
    trainer, module, data = make()
    trainer.fit(module, data)
