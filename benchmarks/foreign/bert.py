"""A BERT of transformers, fine-tuned to classify generated reviews, after Lightning's tutorial of GLUE."""

import random

import lightning as L
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from torchmetrics.functional.classification import multiclass_accuracy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

SUBJECTS = ["the film", "the plot", "this book", "our hotel", "the waiter", "my new phone", "the battery", "the room"]
GOOD = ["wonderful", "a delight", "better than I hoped", "worth every cent", "moving and clever", "superb"]
BAD = ["a mess", "worse than the last one", "broken after a week", "dull and slow", "a waste of money", "poor"]
FILLERS = ["we went there on a Monday", "I bought it for my brother", "it came in a blue box", "others may disagree"]


def write_review(rng):
    """Return a review of one to nine sentences, most of them of one opinion, and whether it is good."""
    label, sentences = rng.randrange(2), []
    for _ in range(rng.choice([1, 3, 3, 5, 7, 9])):
        words = rng.choice(GOOD if (rng.random() < 0.9) == label else BAD)
        sentences.append(f"{rng.choice(SUBJECTS)} was {words}")
        if rng.random() < 0.3:
            sentences.append(rng.choice(FILLERS))
    return " . ".join(sentences), label


class ReviewDataset(Dataset):
    def __init__(self, texts, labels):
        self.texts, self.labels = texts, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        return {"text": self.texts[idx], "label": self.labels[idx]}


class ReviewDataModule(L.LightningDataModule):
    def __init__(self, max_seq_length: int = 128, train_batch_size: int = 16, eval_batch_size: int = 32):
        super().__init__()
        self.max_seq_length = max_seq_length
        self.train_batch_size = train_batch_size
        self.eval_batch_size = eval_batch_size

    def setup(self, stage=None):
        rng = random.Random(0)
        texts, labels = zip(*(write_review(rng) for _ in range(3000)), strict=True)
        self.tokenizer = self.train_tokenizer(texts)
        self.train_set = ReviewDataset(texts[:2500], labels[:2500])
        self.val_set = ReviewDataset(texts[2500:], labels[2500:])

    @staticmethod
    def train_tokenizer(texts):
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
        )

    def collate(self, examples):
        batch = self.tokenizer(
            [example["text"] for example in examples],
            max_length=self.max_seq_length,
            padding="max_length",
            truncation=True,
            return_tensors="pt",
        )
        batch["labels"] = torch.tensor([example["label"] for example in examples])
        return batch

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.train_batch_size, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.eval_batch_size, collate_fn=self.collate)


class GLUETransformer(L.LightningModule):
    def __init__(
        self,
        learning_rate: float = 1e-3,
        adam_epsilon: float = 1e-8,
        warmup_steps: int = 10,
        weight_decay: float = 0.01,
        hidden_size: int = 128,
        num_layers: int = 4,
    ):
        super().__init__()
        self.save_hyperparameters()
        config = BertConfig(
            vocab_size=1000,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 32,
            intermediate_size=4 * hidden_size,
            num_labels=2,
        )
        self.model = BertForSequenceClassification(config)

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("train_loss", outputs.loss, prog_bar=True)
        return outputs.loss

    def validation_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("val_loss", outputs.loss, prog_bar=True)
        self.log("val_acc", multiclass_accuracy(outputs.logits, batch["labels"], num_classes=2), prog_bar=True)

    def configure_optimizers(self):
        """Prepare optimizer and schedule (linear warmup and decay)."""
        no_decay = ["bias", "LayerNorm.weight"]
        named = list(self.model.named_parameters())
        grouped = [
            {"params": [p for n, p in named if not any(nd in n for nd in no_decay)],
             "weight_decay": self.hparams.weight_decay},
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ]  # fmt: skip
        optimizer = AdamW(grouped, lr=self.hparams.learning_rate, eps=self.hparams.adam_epsilon)
        scheduler = get_linear_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams.warmup_steps,
            num_training_steps=self.trainer.estimated_stepping_batches,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 3} | trainer_options)
    return trainer, GLUETransformer(), ReviewDataModule()


if __name__ == "__main__":
    L.seed_everything(42)
    trainer, module, data = make()
    trainer.fit(module, data)
