"""Neural collaborative filtering of generated ratings, of the size of MovieLens-1M's users and films."""

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_USERS, NUM_ITEMS, NUM_AGES, NUM_GENRES = 6040, 3706, 7, 18


class RatingsDataset(Dataset):
    """Ratings that the age of users, the genre of films, and both's own tastes explain."""

    def __init__(self, num_ratings, seed):
        rng = np.random.default_rng(0)
        tastes, kinds = rng.normal(size=(NUM_USERS, 4)), rng.normal(size=(NUM_ITEMS, 4))
        user_ages, item_genres = rng.integers(0, NUM_AGES, NUM_USERS), rng.integers(0, NUM_GENRES, NUM_ITEMS)
        fashion = 2 * rng.normal(size=(NUM_AGES, NUM_GENRES))
        rng = np.random.default_rng((1, seed))
        self.users, self.items = rng.integers(0, NUM_USERS, num_ratings), rng.integers(0, NUM_ITEMS, num_ratings)
        self.ages, self.genres = user_ages[self.users], item_genres[self.items]
        scores = (tastes[self.users] * kinds[self.items]).sum(axis=1) / 4 + fashion[self.ages, self.genres]
        self.ratings = np.clip(np.round(3 + scores + rng.normal(0, 0.3, num_ratings)), 1, 5).astype(np.float32)

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, idx):
        features = {"user": self.users[idx], "item": self.items[idx], "age": self.ages[idx], "genre": self.genres[idx]}
        return features, self.ratings[idx]


class NCF(L.LightningModule):
    def __init__(self, embedding_dim: int = 64, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.user_embedding = nn.Embedding(NUM_USERS, embedding_dim)
        self.item_embedding = nn.Embedding(NUM_ITEMS, embedding_dim)
        self.age_embedding, self.genre_embedding = nn.Embedding(NUM_AGES, 16), nn.Embedding(NUM_GENRES, 16)
        self.mlp = nn.Sequential(
            nn.Linear(2 * embedding_dim + 32, 128), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, user, item, age, genre):
        embedded = [
            self.user_embedding(user),
            self.item_embedding(item),
            self.age_embedding(age),
            self.genre_embedding(genre),
        ]
        return 3 + self.mlp(torch.cat(embedded, dim=-1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        features, rating = batch
        loss = nn.functional.mse_loss(self(**features), rating)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        features, rating = batch
        error = nn.functional.mse_loss(self(**features), rating)
        self.log("val_rmse", error.sqrt(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def make_loaders(batch_size=2048):
    train = DataLoader(RatingsDataset(300_000, seed=0), batch_size=batch_size, shuffle=True)
    return train, DataLoader(RatingsDataset(20_000, seed=1), batch_size=batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 5} | trainer_options)
    train_loader, _ = make_loaders()
    return trainer, NCF(), train_loader


if __name__ == "__main__":
    L.seed_everything(42)
    trainer, module, train_loader = make()
    trainer.fit(module, train_loader)
