"""A U-Net that finds shapes in noisy pictures."""

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ShapesSegmentation(Dataset):
    """Grey pictures (1, H, W) of ellipses and boxes on a gradient, and their masks (1, H, W), made as they are read."""

    def __init__(self, num_samples, image_size=64, seed=0):
        self.num_samples, self.image_size, self.seed = num_samples, image_size, seed
        self.ys, self.xs = np.mgrid[:image_size, :image_size]

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, index))
        image = rng.uniform(-1, 1) * self.xs / self.image_size + rng.uniform(-1, 1) * self.ys / self.image_size
        mask = np.zeros((self.image_size, self.image_size), dtype=bool)
        for _ in range(rng.integers(1, 4)):
            x, y = rng.uniform(8, self.image_size - 8, 2)
            a, b = rng.uniform(4, 14, 2)
            dx, dy = abs(self.xs - x) / a, abs(self.ys - y) / b
            shape = dx**2 + dy**2 < 1 if rng.random() < 0.5 else np.maximum(dx, dy) < 1
            image = np.where(shape, rng.uniform(0.5, 1.5), image)
            mask |= shape
        image = image + rng.normal(0, 0.3, image.shape)
        return torch.tensor(image, dtype=torch.float32)[None], torch.tensor(mask, dtype=torch.float32)[None]


class DoubleConv(nn.Sequential):
    """(convolution => [BN] => ReLU) * 2."""

    def __init__(self, in_channels, out_channels):
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, in_channels=1, out_channels=1, features=(16, 32, 64, 128)):
        super().__init__()
        self.downs, self.ups, self.upconvs = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.pool = nn.MaxPool2d(2)
        for width in features:
            self.downs.append(DoubleConv(in_channels, width))
            in_channels = width
        for width in reversed(features[:-1]):
            self.upconvs.append(nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2))
            self.ups.append(DoubleConv(2 * width, width))
        self.final = nn.Conv2d(features[0], out_channels, kernel_size=1)

    def forward(self, x):
        skips = []
        for i, down in enumerate(self.downs):
            x = down(x)
            if i < len(self.downs) - 1:
                skips.append(x)
                x = self.pool(x)
        for upconv, up in zip(self.upconvs, self.ups, strict=True):
            x = torch.cat([skips.pop(), upconv(x)], dim=1)
            x = up(x)
        return self.final(x)


def dice_loss(logits, target, eps=1.0):
    probs = torch.sigmoid(logits)
    intersection = (probs * target).sum(dim=(1, 2, 3))
    union = probs.sum(dim=(1, 2, 3)) + target.sum(dim=(1, 2, 3))
    return 1 - ((2 * intersection + eps) / (union + eps)).mean()


class SegmentationModel(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet()
        self.bce = nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.net(x)

    def shared_step(self, batch, stage):
        images, masks = batch
        logits = self(images)
        loss = self.bce(logits, masks) + dice_loss(logits, masks)
        with torch.no_grad():
            pred = logits > 0
            inter = (pred & (masks > 0.5)).sum()
            union = (pred | (masks > 0.5)).sum().clamp(min=1)
        self.log(f"{stage}_loss", loss, prog_bar=True)
        self.log(f"{stage}_iou", inter / union, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class ShapesDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, num_samples: int = 1600):
        super().__init__()
        self.batch_size, self.num_samples = batch_size, num_samples

    def train_dataloader(self):
        return DataLoader(ShapesSegmentation(self.num_samples), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(ShapesSegmentation(200, seed=1), batch_size=self.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 10} | trainer_options)
    return trainer, SegmentationModel(), ShapesDataModule()


if __name__ == "__main__":
    L.seed_everything(42)
    trainer, module, data = make()
    trainer.fit(module, data)
