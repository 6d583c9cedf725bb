"""A transformer that forecasts seasonal series from sliding windows."""

import math

import lightning as L
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def make_series(num_hours=4000, num_series=4, seed=0):
    """Return a table (hours, series) with a daily and a weekly season, a trend and noise."""
    rng = np.random.default_rng(seed)
    hours = np.arange(num_hours)
    columns = {}
    for i in range(num_series):
        daily = rng.uniform(0.5, 2) * np.sin(2 * np.pi * hours / 24 + rng.uniform(0, 6))
        weekly = rng.uniform(0.3, 1) * np.sin(2 * np.pi * hours / 168 + rng.uniform(0, 6))
        noise = np.convolve(rng.normal(0, 0.3, num_hours), np.ones(3) / 3, mode="same")
        columns[f"sensor_{i}"] = daily + weekly + rng.normal() * hours / num_hours + noise
    return pd.DataFrame(columns, index=pd.date_range("2024-01-01", periods=num_hours, freq="h"))


class SlidingWindow(Dataset):
    """Windows of the past with features of the calendar, and the hours that follow."""

    def __init__(self, frame, input_len=96, horizon=24):
        self.frame, self.input_len, self.horizon = frame, input_len, horizon
        hour, weekday = frame.index.hour, frame.index.dayofweek
        self.calendar = np.stack([np.sin(2 * np.pi * hour / 24), np.cos(2 * np.pi * hour / 24), weekday / 6], axis=1)

    def __len__(self):
        return len(self.frame) - self.input_len - self.horizon + 1

    def __getitem__(self, idx):
        past = slice(idx, idx + self.input_len)
        future = slice(idx + self.input_len, idx + self.input_len + self.horizon)
        x = np.concatenate([self.frame.iloc[past].to_numpy(), self.calendar[past]], axis=1)
        y = self.frame.iloc[future].to_numpy()
        return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout=0.1, max_len=512):
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)])


class Forecaster(L.LightningModule):
    def __init__(self, num_series: int = 4, horizon: int = 24, d_model: int = 64, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(num_series + 3, d_model)
        self.pos_encoder = PositionalEncoding(d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=4 * d_model, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3)
        self.head = nn.Linear(d_model, horizon * num_series)

    def forward(self, x):
        h = self.encoder(self.pos_encoder(self.embed(x)))
        return self.head(h[:, -1]).view(-1, self.hparams.horizon, self.hparams.num_series)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self(x)
        self.log("val_loss", nn.functional.mse_loss(y_hat, y), prog_bar=True)
        self.log("val_mae", nn.functional.l1_loss(y_hat, y))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        return [optimizer], [scheduler]


class SensorsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        frame = make_series()
        split = int(0.8 * len(frame))
        mean, std = frame[:split].mean(), frame[:split].std()
        frame = (frame - mean) / std
        self.train_set, self.val_set = SlidingWindow(frame[:split]), SlidingWindow(frame[split:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 10} | trainer_options)
    return trainer, Forecaster(), SensorsDataModule()


if __name__ == "__main__":
    L.seed_everything(42)
    trainer, module, data = make()
    trainer.fit(module, data)
