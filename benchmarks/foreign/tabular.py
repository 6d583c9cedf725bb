"""A perceptron with batch norms and dropout on a table of scikit-learn's."""

import lightning as L
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class HousesData(L.LightningDataModule):
    def __init__(self, batch_size: int = 512, num_samples: int = 30_000):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        X, y = make_classification(
            n_samples=self.hparams.num_samples, n_features=54, n_informative=20, n_redundant=10, n_classes=7,
            n_clusters_per_class=3, flip_y=0.02, random_state=0,
        )  # fmt: skip
        X_train, X_val, y_train, y_val = train_test_split(X, y, test_size=0.15, random_state=0, stratify=y)
        scaler = StandardScaler().fit(X_train)
        self.train_set = self.to_dataset(scaler.transform(X_train), y_train)
        self.val_set = self.to_dataset(scaler.transform(X_val), y_val)

    @staticmethod
    def to_dataset(X, y):
        return TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.long))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


class TabularMLP(L.LightningModule):
    def __init__(self, in_features: int = 54, num_classes: int = 7, width: int = 512, depth: int = 4, p: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        layers = []
        for i in range(depth):
            layers += [
                nn.Linear(in_features if i == 0 else width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(p)
            ]  # fmt: skip
        self.model = nn.Sequential(*layers, nn.Linear(width, num_classes))
        self.loss_fn = nn.CrossEntropyLoss()
        metrics = MetricCollection([MulticlassAccuracy(num_classes), MulticlassF1Score(num_classes)])
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = self.loss_fn(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(self.train_metrics(logits, y), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", self.loss_fn(logits, y), prog_bar=True)
        self.val_metrics.update(logits, y)
        self.log_dict(self.val_metrics, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3, weight_decay=1e-5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 10} | trainer_options)
    return trainer, TabularMLP(), HousesData()


if __name__ == "__main__":
    L.seed_everything(0)
    trainer, module, data = make()
    trainer.fit(module, data)
