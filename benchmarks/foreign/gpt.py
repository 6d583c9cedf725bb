"""A GPT-2 of transformers that learns Python's own documentation, character by character."""

from pydoc_data.topics import topics

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class CharDataset(Dataset):
    """Emits windows of characters, each one a sample, as minGPT's does."""

    def __init__(self, text, vocabulary, block_size):
        self.block_size = block_size
        self.stoi = {ch: i for i, ch in enumerate(vocabulary)}
        self.text = text

    def __len__(self):
        return (len(self.text) - 1) // self.block_size

    def __getitem__(self, idx):
        chunk = self.text[idx * self.block_size : (idx + 1) * self.block_size]
        return torch.tensor([self.stoi[ch] for ch in chunk], dtype=torch.long)


class GPT(L.LightningModule):
    def __init__(self, block_size: int = 128, n_embd: int = 128, n_layer: int = 4, lr: float = 5e-4):
        super().__init__()
        self.save_hyperparameters()
        config = GPT2Config(
            vocab_size=128,
            n_positions=block_size,
            n_embd=n_embd,
            n_layer=n_layer,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, labels=input_ids)

    def training_step(self, batch, batch_idx):
        loss = self(batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self(batch).loss
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_ppl", torch.exp(loss))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1, betas=(0.9, 0.95))


class CharDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 16, block_size: int = 128):
        super().__init__()
        self.batch_size, self.block_size = batch_size, block_size

    def setup(self, stage=None):
        text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace").decode()
        split = int(0.95 * len(text))
        vocabulary = [chr(code) for code in range(128)]
        self.train_set = CharDataset(text[:split], vocabulary, self.block_size)
        self.val_set = CharDataset(text[split:], vocabulary, self.block_size)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 5, "gradient_clip_val": 1.0} | trainer_options)
    return trainer, GPT(), CharDataModule()


if __name__ == "__main__":
    L.seed_everything(1337)
    trainer, module, data = make()
    trainer.fit(module, data)
