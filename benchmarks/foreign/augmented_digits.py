# ruff: noqa: NPY002  # the global generator, as most augmentations use it
"""Handwritten digits, augmented with PIL as they are drawn, classified by a small convolutional network."""

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy


class RandomAugment:
    """What torchvision.transforms would do: a random resized crop, a rotation, a jitter of contrast, noise."""

    def __init__(self, size=32, degrees=15, scale=(0.7, 1.0), contrast=0.4):
        self.size, self.degrees, self.scale, self.contrast = size, degrees, scale, contrast

    def __call__(self, image):
        image = image.rotate(np.random.uniform(-self.degrees, self.degrees), resample=Image.Resampling.BILINEAR)
        side = int(image.width * np.sqrt(np.random.uniform(*self.scale)))
        left, top = np.random.randint(0, image.width - side + 1, size=2)
        image = image.crop((left, top, left + side, top + side)).resize((self.size, self.size))
        image = ImageEnhance.Contrast(image).enhance(np.random.uniform(1 - self.contrast, 1 + self.contrast))
        array = np.asarray(image, dtype=np.float32) / 255
        return np.clip(array + np.random.normal(0, 0.05, array.shape).astype(np.float32), 0, 1)


class DigitsDataset(Dataset):
    def __init__(self, images, targets, transform=None):
        self.images, self.targets, self.transform = images, targets, transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = Image.fromarray((self.images[index] * 15.9).astype(np.uint8)).resize((48, 48))
        array = self.transform(image) if self.transform else np.asarray(image.resize((32, 32)), np.float32) / 255
        return (torch.from_numpy(array).unsqueeze(0) - 0.3) / 0.35, int(self.targets[index])


class AugmentedDigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        digits = load_digits()
        splits = train_test_split(digits.images, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
        train_images, val_images, train_targets, val_targets = splits
        self.train_set = DigitsDataset(train_images, train_targets, RandomAugment())
        self.val_set = DigitsDataset(val_images, val_targets)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class ConvNet(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            self.block(1, 32), self.block(32, 32), nn.MaxPool2d(2),
            self.block(32, 64), self.block(64, 64), nn.MaxPool2d(2),
            self.block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(128, 10))
        self.train_acc = MulticlassAccuracy(num_classes=10)
        self.val_acc = MulticlassAccuracy(num_classes=10)

    @staticmethod
    def block(in_channels, out_channels):
        conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.classifier(self.features(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 10} | trainer_options)
    return trainer, ConvNet(), AugmentedDigitsData()


if __name__ == "__main__":
    L.seed_everything(42, workers=True)
    trainer, module, data = make()
    trainer.fit(module, data)
