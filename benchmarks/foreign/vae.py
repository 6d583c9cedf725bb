"""A convolutional variational autoencoder of handwritten digits."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class VAE(L.LightningModule):
    def __init__(self, latent_dim: int = 16, lr: float = 1e-3, kl_coeff: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128), nn.LeakyReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.fc_mu = nn.Linear(128 * 4 * 4, latent_dim)
        self.fc_var = nn.Linear(128 * 4 * 4, latent_dim)
        self.decoder_input = nn.Linear(latent_dim, 128 * 4 * 4)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(128, 64, 3, stride=2, padding=1, output_padding=1), nn.BatchNorm2d(64), nn.LeakyReLU(),
            nn.ConvTranspose2d(64, 32, 3, stride=2, padding=1, output_padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(),
            nn.ConvTranspose2d(32, 32, 3, stride=2, padding=1, output_padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(),
            nn.Conv2d(32, 1, 3, padding=1),
        )  # fmt: skip

    def decode(self, z):
        return self.decoder(self.decoder_input(z).view(-1, 128, 4, 4))

    def forward(self, x):
        hidden = self.encoder(x)
        mu, log_var = self.fc_mu(hidden), self.fc_var(hidden)
        std = torch.exp(0.5 * log_var)
        z = mu + std * torch.randn_like(std)
        return self.decode(z), mu, log_var

    def step(self, batch):
        (x,) = batch
        logits, mu, log_var = self(x)
        recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(dim=(1, 2, 3)).mean()
        kl = -0.5 * torch.mean(torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1))
        loss = recon + self.hparams.kl_coeff * kl
        return loss, {"recon_loss": recon, "kl": kl, "loss": loss}

    def training_step(self, batch, batch_idx):
        loss, logs = self.step(batch)
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logs = self.step(batch)
        self.log_dict({f"val_{k}": v for k, v in logs.items()})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class VAEData(L.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        images = F.interpolate(images, size=32, mode="bilinear").clamp(0, 1)
        generator = torch.Generator().manual_seed(0)
        self.train_set, self.val_set = random_split(TensorDataset(images), [1600, 197], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 30} | trainer_options)
    return trainer, VAE(), VAEData()


if __name__ == "__main__":
    L.seed_everything(1234)
    trainer, module, data = make()
    trainer.fit(module, data)
