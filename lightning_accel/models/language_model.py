"""Decoder-only language model with mixtures of experts. Shapes: B samples, T tokens, V vocabulary, D width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torchmetrics.aggregation import MeanMetric

from lightning_accel.models.experts import Experts
from lightning_accel.models.hooks import (
    EpochLoad,
    SizedModel,
    is_logging_step,
    keep_plain_hyperparameters,
    num_replicas,
)
from lightning_accel.nn import (
    ExpertLoad,
    FeedForward,
    GateReport,
    KeyValueCache,
    MixtureOfExperts,
    TopKGate,
    TransformerBlock,
    summarise_load,
)
from lightning_accel.nn.moe.gating import GateFactory
from lightning_accel.nn.transformer import visible_tokens
from lightning_accel.ops.bounds import if_set, require_at_least, require_flags, require_integers, require_share
from lightning_accel.ops.evaluation import evaluating
from lightning_accel.ops.options import options_of, read_options
from lightning_accel.ops.renames import renamed_arguments
from lightning_accel.ops.token_sampling import draw_tokens
from lightning_accel.strategies.gradients import clip_grad_norm_
from lightning_accel.strategies.mixed_updates import update_mixed_groups_one_by_one
from lightning_accel.strategies.sharding.blocks import broadcast_state


@dataclass(frozen=True)
class Attention:
    """Hold the options of a language model's attention layers.

    Args:
        num_heads: number of heads of queries.
        num_key_value_heads: number of heads of keys and values, which divides ``num_heads``; by default as many. With
            fewer, adjacent heads of queries share them, and generation keeps less (grouped-query attention).
        separate_documents: tokens see only those of their own document, where a row holds several. A document begins
            with the separator, the last token of the vocabulary.

    Example:
        >>> from lightning_accel import MoELanguageModel
        >>> model = MoELanguageModel(vocab_size=257, attention=Attention(num_heads=8, num_key_value_heads=2))
    """

    num_heads: int = 4
    num_key_value_heads: int | None = None
    separate_documents: bool = False


@dataclass(frozen=True)
class Generation:
    """Hold how a language model continues prompts.

    Args:
        max_new_tokens: number of tokens to add to a prompt.
        temperature: divides the logits; below 1 favours probable tokens, 0 takes the most probable one.
        sample_from: draw from this many of the most probable tokens; 0 for all.

    Example:
        >>> from lightning_accel import MoELanguageModel
        >>> model = MoELanguageModel(vocab_size=257, generation=Generation(max_new_tokens=50, temperature=0.8))
    """

    max_new_tokens: int = 200
    temperature: float = 1.0
    sample_from: int = 0


class LanguageModelOutput(NamedTuple):
    """Hold the scores of the next token, and the reports of the gates."""

    logits: Tensor  # (B, T, V)
    reports: list[GateReport]  # one for each mixture


class MoELanguageModel(SizedModel):
    """Predict the next token by RMSNorm, rotary positions, causal attention, and mixtures of SwiGLU experts.

    Batches are token numbers (B, T + 1) int64: the model sees the first T and predicts the last T. The loss is cross
    entropy plus ``experts.balance_weight`` times the mean of the gates' balance losses and ``experts.z_weight`` times
    that of their z-losses. Logged: ``train/loss`` (cross entropy, nats per token), ``train/balance_loss``,
    ``train/tokens`` (seen so far) and the statistics of the gates by :func:`lightning_accel.nn.summarise_load`;
    ``loss``, ``perplexity`` and, if the datamodule has an attribute ``bytes_per_token``, ``bits_per_byte`` under
    ``val/`` and ``test/``, and ``val/max_violation``: how far the busiest expert of any mixture exceeds an equal share
    over the whole validation.

    ``predict`` takes prompts, token numbers (B, T) of equal length, and generates their continuations.

    Args:
        vocab_size: V, the number of different tokens; by default the datamodule's attribute of that name.
        dim: D, the width of the model.
        num_layers: number of blocks of attention and a perceptron or a mixture.
        attention: the options of each attention layer, see :class:`lightning_accel.models.Attention`.
        experts: the options of each mixture, see :class:`lightning_accel.models.Experts`.
        moe_every: one in so many blocks, the last of them, has a mixture; 0 for none, a dense model. The others have a
            hidden width of ``experts.k * experts.hidden_dim``, of the same cost.
        gate: class or function that creates a gate, such as :class:`lightning_accel.TopKGate`; called with ``dim``,
            ``num_experts`` and ``k``. Hyperparameters contain it if a config
            named it, else pass it to ``load_from_checkpoint`` again.
        tie_embeddings: score tokens by the weights that embed them (Press and Wolf 2017,
            https://arxiv.org/abs/1608.05859).
        dropout: share of the output of a layer that is dropped in training.
        activation_checkpointing: keep only the input of each block, and recompute the rest in the backward pass.
        generation: how ``predict`` continues prompts, see :class:`lightning_accel.models.Generation`.
        optimizer: creates the optimizer; called with the parameters.

    Raises:
        TypeError: if an option has another type.
        ValueError: if a number is out of range, or the gate uses later tokens; before a run starts, if ``vocab_size``
            is neither given nor provided by the datamodule, or contradicts it.

    Source: SwiGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202; rotary positions: Su et al. 2021,
    https://arxiv.org/abs/2104.09864; balance loss: Fedus et al. 2021, https://arxiv.org/abs/2101.03961.

    Example:
        >>> attention, experts = Attention(num_heads=2), Experts(hidden_dim=8)
        >>> model = MoELanguageModel(vocab_size=11, dim=8, attention=attention, experts=experts)
        >>> model(torch.randint(11, (3, 5))).logits.shape
        torch.Size([3, 5, 11])
    """

    tokens_seen: Tensor
    from_datamodule: ClassVar = {"vocab_size": int}

    @renamed_arguments(
        expert_dim="experts.hidden_dim",
        num_heads="attention.num_heads",
        **{name: f"experts.{name}" for name in options_of(Experts())},
        **{name: f"generation.{name}" for name in options_of(Generation())},
    )
    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        dim: int = 128,
        num_layers: int = 4,
        attention: Attention = Attention(),
        experts: Experts = Experts(),
        moe_every: int = 1,
        gate: GateFactory = TopKGate,
        tie_embeddings: bool = False,
        dropout: float = 0.0,
        activation_checkpointing: bool = False,
        generation: Generation = Generation(),
        optimizer: OptimizerCallable = torch.optim.AdamW,
    ) -> None:
        super().__init__()
        experts, generation = read_options(Experts, experts), read_options(Generation, generation)
        attention = read_options(Attention, attention)
        new_tokens, temperature, sample_from = generation.max_new_tokens, generation.temperature, generation.sample_from
        require_integers(1, dim=dim, num_layers=num_layers, max_new_tokens=new_tokens, **if_set(vocab_size=vocab_size))
        require_share(dropout=dropout)
        require_flags(tie_embeddings=tie_embeddings, activation_checkpointing=activation_checkpointing)
        require_integers(0, moe_every=moe_every, **if_set(sample_from=sample_from))
        require_at_least(0, temperature=temperature)
        self.save_hyperparameters(ignore=["optimizer"])
        keep_plain_hyperparameters(self)
        self.vocab_size = vocab_size
        self.dim = dim
        self.balance_weight = experts.balance_weight
        self.z_weight = 0.001 if experts.z_weight is None else experts.z_weight
        self.separate_documents = attention.separate_documents
        self.tie_embeddings = tie_embeddings
        self.activation_checkpointing = activation_checkpointing
        self.generation = generation
        self.make_optimizer = optimizer

        def feed_forward(number: int) -> nn.Module:
            if not moe_every or (number + 1) % moe_every:
                return FeedForward(dim, experts.k * experts.hidden_dim)
            sizes = dim, experts.hidden_dim, experts.num_experts, experts.k
            return MixtureOfExperts(*sizes, activation="silu", gated=True, bias=False, gate=gate)

        self.blocks = nn.ModuleList(
            TransformerBlock(dim, attention.num_heads, feed_forward(number), dropout, attention.num_key_value_heads)
            for number in range(num_layers)
        )
        self.norm = nn.RMSNorm(dim)
        gates = self._gates()
        if any(not getattr(gate, "causal", True) for gate in gates):
            raise ValueError(
                f"{type(gates[0]).__name__} looks at later tokens than the one it routes, which a language model must "
                "not: it could not generate. Use TopKGate"
            )
        self.expert_load = ExpertLoad(gates)
        self.embedding: nn.Embedding | None = None
        self.bytes_per_token: float | None = None
        self.tokenizer: Any = None
        self.register_load_state_dict_pre_hook(_require_tied)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))
        self.val_loss, self.test_loss = MeanMetric(), MeanMetric()
        self.val_load = EpochLoad(len(gates), experts.num_experts)
        if vocab_size is not None:
            self.configure_model()

    def _read_datamodule(self) -> None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
        self.bytes_per_token = getattr(datamodule, "bytes_per_token", None)
        self.tokenizer = getattr(datamodule, "tokenizer", None)
        super()._read_datamodule()

    def _is_built(self) -> bool:
        return self.embedding is not None

    def _require_sizes(self) -> None:
        if self.vocab_size is None:
            raise ValueError(
                "MoELanguageModel needs vocab_size; pass it, or train with a datamodule that has such an attribute, as "
                "TextDataModule has"
            )

    def configure_model(self) -> None:
        """Build the layers whose sizes may come from the datamodule, and shard weights if there is a mesh for it."""
        self._build_once()
        mesh = _tensor_parallel_mesh(self.device_mesh)
        if mesh is not None and not isinstance(self.head.weight, DTensor):
            parallelize_module(self, mesh, self.tensor_parallel_plan(mesh.size()))
            self._tie()  # both are sharded by tokens
            broadcast_state(self, torch.device(mesh.device_type))  # the other weights, which stay plain tensors

    def tensor_parallel_plan(self, num_devices: int) -> dict[str, ParallelStyle]:
        """Return how ``ModelParallelStrategy`` shards the weights: attention by heads, the scores by tokens.

        Everything else, including mixtures, is replicated on every device and computes the same there.

        Raises:
            ValueError: if ``num_devices`` does not divide the heads of keys and values of an attention layer.
        """
        plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Replicate())}
        if self.tie_embeddings:
            plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        for number, block in enumerate(self.blocks):
            heads = int(block.attention.num_key_value_heads)  # type: ignore[arg-type, union-attr]
            if heads % num_devices:
                raise ValueError(
                    f"tensor_parallel_size must divide the heads of keys and values; got {num_devices} and {heads}"
                )
            plan[f"blocks.{number}.attention.query_key_value"] = ColwiseParallel()
            plan[f"blocks.{number}.attention.out"] = RowwiseParallel()
        return plan

    def _build(self) -> None:
        """Create and initialize the layers whose sizes depend on the vocabulary, and scale the blocks' outputs."""
        assert self.vocab_size is not None
        self.embedding = nn.Embedding(self.vocab_size, self.dim)
        self.head = nn.Linear(self.dim, self.vocab_size, bias=False)
        self._tie()
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)
        # The sum of the blocks' outputs must not grow with their number (Radford et al. 2019, GPT-2, section 2.3).
        with torch.no_grad():
            for name, parameter in self.blocks.named_parameters():
                if name.endswith(("attention.out.weight", "down.weight", "down_weight")):
                    parameter.div_(math.sqrt(2 * len(self.blocks)))

    def _tie(self) -> None:
        if self.tie_embeddings:
            assert self.embedding is not None
            self.head.weight = self.embedding.weight

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm != "value" and isinstance(self.head.weight, DTensor):
            clip_grad_norm_(self.parameters(), gradient_clip_val)
        else:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def pipeline_layers(self) -> list[nn.Module]:
        """Return the layers in the order in which ``forward`` calls them, for strategies that split them."""
        assert self.embedding is not None
        return [self.embedding, *self.blocks, self.norm, self.head]

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> LanguageModelOutput: ...

    def forward(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> LanguageModelOutput:
        """Score what follows each of ``tokens`` (B, T) int64, which continue those that ``caches`` hold."""
        if self.embedding is None:
            raise RuntimeError("the vocabulary of this MoELanguageModel is not known yet; pass vocab_size")
        visible = self._visible(tokens, caches) if self.separate_documents else None
        x = self.embedding(tokens)  # (B, T, D)
        reports = []
        for number, block in enumerate(self.blocks):
            if self.activation_checkpointing and self.training and caches is None:
                x, report = checkpoint(block, x, None, visible, use_reentrant=False)
            else:
                x, report = block(x, None if caches is None else caches[number], visible)
            reports += [] if report is None else [report]
        logits = self.head(self.norm(x))
        # Here, so that a subclass's own training_step need not do it; and after the last layer, since in a pipeline the
        # code before it runs on several stages.
        if self.training:
            self.expert_load.add(reports)
        return LanguageModelOutput(logits, reports)

    def _visible(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None) -> Tensor:
        """Return which tokens each of ``tokens`` sees, (B, 1, T, S) bool, S of them with those that ``caches`` hold."""
        assert self.vocab_size is not None
        documents = (tokens == self.vocab_size - 1).cumsum(dim=1)
        if caches is not None:
            if (before := caches[0].documents) is not None:
                documents = torch.cat([before, before[:, -1:] + documents], dim=1)
            caches[0].documents = documents
        return visible_tokens(documents, tokens.shape[1])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits, reports = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        self.tokens_seen += batch[:, 1:].numel() * num_replicas(self)
        if is_logging_step(self):
            self.log("train/loss", loss, prog_bar=True)
            self.log("train/tokens", self.tokens_seen.float(), reduce_fx="max", sync_dist=False)
            if reports:
                self.log("train/balance_loss", torch.stack([report.balance_loss for report in reports]).mean())
        return loss + self.auxiliary_loss(reports)

    def auxiliary_loss(self, reports: Sequence[GateReport]) -> Tensor | float:
        """Compute what the gates add to the loss, ()."""
        if not reports:
            return 0.0
        balance = torch.stack([report.balance_loss for report in reports]).mean()
        return self.balance_weight * balance + self.z_weight * torch.stack([r.z_loss for r in reports]).mean()

    def on_fit_start(self) -> None:
        mesh = self.device_mesh if _tensor_parallel_mesh(self.device_mesh) else None
        group = None if mesh is None else mesh.get_group("data_parallel")  # the other processes see equal tokens
        if mesh is not None:
            update_mixed_groups_one_by_one(self.trainer.optimizers)
        self.expert_load = ExpertLoad(self._gates(), group)
        self.expert_load.start()

    def _gates(self) -> list[Any]:
        layers = [block.feed_forward for block in self.blocks]  # a subclass may have replaced them
        return [layer.gate for layer in layers if isinstance(layer, MixtureOfExperts)]

    def after_removal(self) -> None:
        """Count the load of the experts that are left, see :func:`~lightning_accel.compress.apply_plan_`."""
        gates = self._gates()
        self.expert_load.track(gates)
        self.expert_load.start()
        self.val_load = EpochLoad(len(gates), gates[0].num_experts if gates else 1).to(self.device)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        statistics = self.expert_load.step()
        if statistics and is_logging_step(self):
            self.log_dict({f"train/{name}": value for name, value in summarise_load(statistics).items()})
            self.expert_load.warn_if_collapsed()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        reports = self._evaluate(batch, self.val_loss)
        if reports:
            self.val_load.update(reports)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, self.test_loss)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val", self.val_loss)
        if self.val_load.update_called:
            load = self.val_load.compute()
            self.val_load.reset()
            self.log("val/max_violation", load.max() * load.shape[1] - 1, sync_dist=True)

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test", self.test_loss)

    def _evaluate(self, batch: Tensor, loss: MeanMetric) -> list[GateReport]:
        logits, reports = self(batch[:, :-1])
        loss.update(F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()), weight=batch[:, 1:].numel())
        return reports

    def _log_evaluation(self, stage: str, metric: MeanMetric) -> None:
        loss = metric.compute()  # over all processes
        metric.reset()
        figures = {"loss": loss, "perplexity": loss.exp()}
        if self.bytes_per_token is not None:
            figures["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        self.log_dict({f"{stage}/{name}": value for name, value in figures.items()}, prog_bar=True, sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        """Continue prompts (B, T); return texts if the datamodule has a tokenizer, else tokens (B, T + new)."""
        tokens = self.generate(batch, **options_of(self.generation))
        if self.tokenizer is None:
            return {"tokens": tokens}
        prompts, texts = ([self._decode(row) for row in rows.tolist()] for rows in (batch, tokens[:, batch.shape[1] :]))
        return {"prompt": prompts, "text": texts}

    def _decode(self, tokens: list[int]) -> str:
        """Decode the text up to the separator, the last token of the vocabulary."""
        assert self.vocab_size is not None
        separator = self.vocab_size - 1
        return self.tokenizer.decode(tokens[: tokens.index(separator)] if separator in tokens else tokens)

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        sample_from: int = 0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw ``max_new_tokens`` after ``tokens`` (B, T) int64, one by one, each by the forward pass of one token.

        Args:
            tokens: prompts of equal length, at least 1.
            max_new_tokens: number of tokens to add.
            temperature: divides the logits; 0 takes the most probable token.
            sample_from: draw from this many of the most probable tokens; 0 for all.
            generator: random number generator.

        Returns:
            (B, T + ``max_new_tokens``).
        """
        if tokens.ndim != 2 or tokens.shape[1] < 1:
            raise ValueError(f"need prompts (B, T) of at least one token; got {tuple(tokens.shape)}")
        caches = [KeyValueCache(tokens.shape[1] + max_new_tokens) for _ in self.blocks]
        new = tokens
        with evaluating(self):
            for _ in range(max_new_tokens):
                logits = self(new, caches).logits[:, -1].float()
                new = draw_tokens(logits, temperature, sample_from, generator)
                tokens = torch.cat([tokens, new], dim=1)
        return tokens


def _tensor_parallel_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the dimension ``tensor_parallel`` of the mesh that Lightning's ``ModelParallelStrategy`` sets.

    Raises:
        ValueError: if there is data parallelism, too: gradients would not be averaged over it.
    """
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.size() > mesh["tensor_parallel"].size():
        raise ValueError(
            f"under ModelParallelStrategy with data_parallel_size={mesh['data_parallel'].size()} nothing would average "
            "the gradients of this model. Set data_parallel_size=1, or take the strategy 'accel_fsdp2'"
        )
    return mesh["tensor_parallel"]


def _require_tied(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise a ValueError if two different weights would be loaded into one, of which the last would remain."""
    if not module.tie_embeddings:
        return
    found = [state_dict.get(f"{prefix}{name}.weight") for name in ("embedding", "head")]
    weights = [one for one in found if one is not None and not isinstance(one, DTensor) and not one.is_meta]
    if len(weights) == 2 and not torch.equal(*weights):
        raise ValueError(
            "tie_embeddings=True needs a checkpoint whose embedding.weight and head.weight are equal, and they differ; "
            "load it with tie_embeddings=False"
        )
