"""A ResNet-18 that learns to tell generated textures apart, after Lightning's tutorial for CIFAR-10."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.functional import accuracy

NUM_CLASSES = 8


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers=(2, 2, 2, 2), num_classes=NUM_CLASSES):
        super().__init__()
        self.in_planes = 64
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._make_layer(64, layers[0], stride=1)
        self.layer2 = self._make_layer(128, layers[1], stride=2)
        self.layer3 = self._make_layer(256, layers[2], stride=2)
        self.layer4 = self._make_layer(512, layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _make_layer(self, planes, blocks, stride):
        layers = [BasicBlock(self.in_planes, planes, stride)]
        self.in_planes = planes
        layers += [BasicBlock(planes, planes) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class LitResnet(L.LightningModule):
    def __init__(self, lr: float = 0.02, num_classes: int = NUM_CLASSES):
        super().__init__()
        self.save_hyperparameters()
        self.model = ResNet(num_classes=num_classes)

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        preds = torch.argmax(logits, dim=1)
        acc = accuracy(preds, y, task="multiclass", num_classes=self.hparams.num_classes)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", acc, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = OneCycleLR(optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TexturesDataModule(L.LightningDataModule):
    """Gratings of NUM_CLASSES orientations in random colours, frequencies and phases, with noise."""

    def __init__(self, batch_size: int = 32, num_samples: int = 2400, image_size: int = 64):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        n, size = self.hparams.num_samples, self.hparams.image_size
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(NUM_CLASSES, (n,), generator=generator)
        angles = (targets + 0.4 * torch.rand(n, generator=generator)) * torch.pi / NUM_CLASSES
        frequency = 0.3 + 0.5 * torch.rand(n, generator=generator)
        phase = 6.3 * torch.rand(n, generator=generator)
        ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        along = torch.cos(angles)[:, None, None] * xs + torch.sin(angles)[:, None, None] * ys
        waves = torch.sin(frequency[:, None, None] * along + phase[:, None, None])
        images = waves[:, None] * torch.rand(n, 3, 1, 1, generator=generator)
        images += 0.5 * torch.randn(images.shape, generator=generator)
        dataset = TensorDataset(images, targets)
        self.train_set, self.val_set = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 5} | trainer_options)
    return trainer, LitResnet(), TexturesDataModule()


if __name__ == "__main__":
    L.seed_everything(7)
    trainer, module, data = make()
    trainer.fit(module, data)
