"""A denoising diffusion model of handwritten digits with a small U-shaped network."""

import math

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


class SinusoidalEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / (half - 1))
        args = t[:, None].float() * freqs[None]
        return torch.cat([args.sin(), args.cos()], dim=-1)


class ResidualBlock(nn.Module):
    def __init__(self, in_channels, out_channels, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_proj = nn.Linear(time_dim, out_channels)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x, t_emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time_proj(F.silu(t_emb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return h + self.shortcut(x)


class Denoiser(nn.Module):
    def __init__(self, channels=32, time_dim=128):
        super().__init__()
        self.time_mlp = nn.Sequential(
            SinusoidalEmbedding(time_dim), nn.Linear(time_dim, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim)
        )
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.down1 = ResidualBlock(channels, channels, time_dim)
        self.pool1 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.down2 = ResidualBlock(channels, 2 * channels, time_dim)
        self.pool2 = nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1)
        self.mid = ResidualBlock(2 * channels, 2 * channels, time_dim)
        self.up2 = ResidualBlock(4 * channels, channels, time_dim)
        self.up1 = ResidualBlock(2 * channels, channels, time_dim)
        self.out = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, x, t):
        t_emb = self.time_mlp(t)
        h1 = self.down1(self.stem(x), t_emb)
        h2 = self.down2(self.pool1(h1), t_emb)
        h = self.mid(self.pool2(h2), t_emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.up2(torch.cat([h, h2], dim=1), t_emb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        return self.out(self.up1(torch.cat([h, h1], dim=1), t_emb))


class DDPM(L.LightningModule):
    def __init__(self, timesteps: int = 1000, lr: float = 2e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = Denoiser()
        betas = torch.linspace(1e-4, 0.02, timesteps)
        alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())

    def forward(self, x, t):
        return self.model(x, t)

    def p_losses(self, x):
        t = torch.randint(0, self.hparams.timesteps, (x.shape[0],), device=self.device)
        noise = torch.randn_like(x)
        a = self.sqrt_alphas_cumprod[t][:, None, None, None]
        b = self.sqrt_one_minus_alphas_cumprod[t][:, None, None, None]
        return F.mse_loss(self(a * x + b * noise, t), noise)

    def training_step(self, batch, batch_idx):
        loss = self.p_losses(batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.p_losses(batch[0]), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class DiffusionData(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        images = F.interpolate(images, size=32, mode="bilinear").clamp(-1, 1)
        generator = torch.Generator().manual_seed(0)
        self.train_set, self.val_set = random_split(TensorDataset(images), [1600, 197], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 20} | trainer_options)
    return trainer, DDPM(), DiffusionData()


if __name__ == "__main__":
    L.seed_everything(42)
    trainer, module, data = make()
    trainer.fit(module, data)
