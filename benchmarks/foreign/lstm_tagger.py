"""A bidirectional LSTM that tags the words of generated sentences of unequal lengths."""

import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

TAGS = ["DET", "ADJ", "NOUN", "VERB", "ADV", "PREP"]
PAD_TAG = -100


def make_lexicon(words_per_tag=300, ambiguous=200):
    """Return the words of each tag; some words belong to two tags, so that the neighbours decide."""
    lexicon = {tag: [f"{tag.lower()}{i}" for i in range(words_per_tag)] for tag in TAGS}
    for i in range(ambiguous):
        lexicon["NOUN"].append(f"both{i}")
        lexicon["VERB"].append(f"both{i}")
    return lexicon


def noun_phrase(rng):
    return ["DET"] * (rng.random() < 0.8) + ["ADJ"] * rng.choice([0, 0, 1, 2]) + ["NOUN"]


def make_sentence(rng, lexicon):
    tags = []
    for _ in range(rng.choice([1, 1, 2, 3, 5])):
        tags += noun_phrase(rng) + ["ADV"] * (rng.random() < 0.3) + ["VERB"] + noun_phrase(rng)
        if rng.random() < 0.5:
            tags += ["PREP", *noun_phrase(rng)]
    return [rng.choice(lexicon[tag]) for tag in tags], tags


class TaggingDataset(Dataset):
    def __init__(self, sentences, word_to_ix, tag_to_ix):
        self.sentences, self.word_to_ix, self.tag_to_ix = sentences, word_to_ix, tag_to_ix

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, idx):
        words, tags = self.sentences[idx]
        x = torch.tensor([self.word_to_ix[w] for w in words], dtype=torch.long)
        return x, torch.tensor([self.tag_to_ix[t] for t in tags], dtype=torch.long)


def pad_collate(batch):
    xs, ys = zip(*batch, strict=True)
    lengths = torch.tensor([len(x) for x in xs])
    xs = pad_sequence(xs, batch_first=True, padding_value=0)
    return xs, pad_sequence(ys, batch_first=True, padding_value=PAD_TAG), lengths


class LSTMTagger(L.LightningModule):
    def __init__(self, vocab_size, embedding_dim=100, hidden_dim=128, num_layers=2, dropout=0.3, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_dim, padding_idx=0)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            embedding_dim, hidden_dim, num_layers, batch_first=True, bidirectional=True, dropout=dropout
        )
        self.hidden2tag = nn.Linear(2 * hidden_dim, len(TAGS))

    def forward(self, sentences, lengths):
        embeds = self.dropout(self.word_embeddings(sentences))
        packed = pack_padded_sequence(embeds, lengths.cpu(), batch_first=True, enforce_sorted=False)
        lstm_out, _ = self.lstm(packed)
        lstm_out, _ = pad_packed_sequence(lstm_out, batch_first=True)
        return self.hidden2tag(self.dropout(lstm_out))

    def _loss(self, batch):
        x, y, lengths = batch
        logits = self(x, lengths)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD_TAG)
        mask = y != PAD_TAG
        return loss, (logits.argmax(-1) == y)[mask].float().mean()

    def training_step(self, batch, batch_idx):
        loss, acc = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", acc, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, acc = self._loss(batch)
        self.log_dict({"val_loss": loss, "val_acc": acc}, batch_size=len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def make_loaders(num_sentences=3600, batch_size=32):
    rng, lexicon = random.Random(0), make_lexicon()
    sentences = [make_sentence(rng, lexicon) for _ in range(num_sentences)]
    word_to_ix = {word: i + 1 for i, word in enumerate(sorted({w for words in lexicon.values() for w in words}))}
    tag_to_ix = {tag: i for i, tag in enumerate(TAGS)}
    split = int(0.9 * num_sentences)
    train = TaggingDataset(sentences[:split], word_to_ix, tag_to_ix)
    val = TaggingDataset(sentences[split:], word_to_ix, tag_to_ix)
    return (
        DataLoader(train, batch_size=batch_size, shuffle=True, collate_fn=pad_collate),
        DataLoader(val, batch_size=batch_size, collate_fn=pad_collate),
        len(word_to_ix) + 1,
    )


class TaggingDataModule(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.train_loader, self.val_loader, self.vocab_size = make_loaders(batch_size=batch_size)

    def train_dataloader(self):
        return self.train_loader

    def val_dataloader(self):
        return self.val_loader


def make(**trainer_options):
    data = TaggingDataModule()
    trainer = L.Trainer(**{"max_epochs": 10} | trainer_options)
    return trainer, LSTMTagger(data.vocab_size), data


if __name__ == "__main__":
    L.seed_everything(1)
    trainer, module, data = make()
    trainer.fit(module, data)
