"""Decoders whose keys and values of previous tokens are arguments. Shapes: B samples, T tokens, S places of the cache.

Further: L layers, M heads of keys and values, F features of a head, V words of the vocabulary.
"""

import inspect
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel.compress.calls import Inputs, first_line
from lightning_accel.compress.export.verification import difference_of, tolerance_of
from lightning_accel.ops.evaluation import evaluating
from lightning_accel.ops.extras import require_module

_CACHE_OF_TRANSFORMERS = {"past_key_values", "use_cache"}


class Decoded(NamedTuple):
    """Hold the scores of the next token, and what to write into the cache at the places of the given tokens."""

    logits: Tensor  # (B, V)
    new_keys: Tensor  # (B, L, M, T, F)
    new_values: Tensor  # (B, L, M, T, F)


class CachedDecoder(nn.Module):
    """Run a causal language model on the tokens that follow those of a cache, which the caller keeps.

    Calls depend on their arguments alone, so that a file can hold the module: the prompt and each further token are
    calls of one program, for batches and prompts of any size. :meth:`Compressed.generate` continues texts with it.

    Args:
        model: a decoder of transformers that returns ``logits``, or a
            :class:`~lightning_accel.MoELanguageModel`; it is shared, not copied.
        max_length: S, the largest number of tokens of a text, its prompt included.

    Raises:
        TypeError: if ``model`` is of another kind, or separates documents.
        ValueError: if ``max_length`` is less than 3, or more than the model has positions for.

    >>> from lightning_accel.models import MoELanguageModel
    >>> model = MoELanguageModel(vocab_size=9, dim=8, num_layers=2, attention={"num_heads": 2}).eval()
    >>> decoder = CachedDecoder(model, max_length=6)
    >>> (args, _), step = decoder.calls(torch.tensor([[1, 2, 3]]))
    >>> decoder(*args).new_keys.shape
    torch.Size([1, 2, 2, 3, 4])
    """

    def __init__(self, model: nn.Module, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.max_length = max_length
        if max_length < 3:
            raise ValueError(f"max_length must be at least 3, two tokens and one that follows; got {max_length}")
        self.parameters_of_forward = _parameters_of_forward(model)
        self.is_of_transformers = self.parameters_of_forward >= _CACHE_OF_TRANSFORMERS
        if not _takes_cache(model):
            part = next((name for name, one in model.named_modules() if _is_language_model(one)), None)
            advice = "Export it without max_length" if part is None else f"Take module={part!r}, which has"
            raise TypeError(
                f"{type(model).__name__} has no cache of keys and values that can be an argument: its forward takes no "
                "past_key_values and use_cache, as causal language models of transformers do, nor is it a "
                f"MoELanguageModel. {advice}"
            )
        if getattr(model, "separate_documents", False):
            raise TypeError(
                f"{type(model).__name__} separates documents, and the beginning of the current one is no argument of "
                "such a file. Export it without max_length"
            )
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise TypeError(f"{type(model).__name__} has an encoder; generation is exported for decoders alone")
        largest = getattr(config, "max_position_embeddings", None)
        if isinstance(largest, int) and max_length > largest:
            raise ValueError(f"{type(model).__name__} has positions for {largest} tokens; got max_length={max_length}")

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Decoded:
        """Score what follows ``tokens``.

        Args:
            tokens: (B, T) int64.
            keys: keys of previous tokens in the first ``position`` places, (B, L, M, S, F).
            values: likewise, (B, L, M, S, F).
            position: number of previous tokens, int64 without dimensions.
        """
        layers = [_layer_class()(*one, position) for one in zip(keys.unbind(1), values.unbind(1), strict=True)]
        if self.is_of_transformers:
            given = require_module("transformers.cache_utils").Cache(layers=layers)
            options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in self.parameters_of_forward else {}
            if "position_ids" in self.parameters_of_forward:
                options["position_ids"] = (position + torch.arange(tokens.shape[1], device=tokens.device)).unsqueeze(0)
            logits = self.model(tokens, past_key_values=given, use_cache=True, **options).logits
        else:
            logits = self.model(tokens, layers).logits
        new_keys, new_values = zip(*(one.new for one in layers), strict=True)
        return Decoded(logits[:, -1], torch.stack(new_keys, 1), torch.stack(new_values, 1))

    @torch.no_grad()
    def calls(self, tokens: Tensor) -> list[Inputs]:
        """Return the call with the prompts ``tokens`` (B, T), and that with the next token of each.

        Raises:
            ValueError: if there are fewer than two tokens, or more than S - 1.
            TypeError: if the model does not keep keys and values of one shape, or computes something else with them
                than without.
        """
        if tokens.dim() != 2 or not 2 <= tokens.shape[1] < self.max_length:
            raise ValueError(
                f"need prompts (B, T) of 2 to {self.max_length - 1} tokens, one less than max_length; got "
                f"{tuple(tokens.shape)}"
            )
        name = type(self.model).__name__
        with evaluating(self):
            try:
                calls, pairs = self._try_calls(tokens)
            except Exception as error:  # whatever a foreign model raises
                raise TypeError(
                    f"{name} does not run with a cache of fixed length, an argument: {first_line(error)}. Export it "
                    "without max_length"
                ) from error
        for found, expected in pairs:
            difference = difference_of(found, expected)
            if not difference <= tolerance_of(expected.dtype):
                raise TypeError(
                    f"with a cache of fixed length, logits of {name} differ by {difference:.2g} of the largest, at "
                    "texts of other lengths perhaps, on which its positions depend. Export it without max_length"
                )
        return calls

    def _try_calls(self, tokens: Tensor) -> tuple[list[Inputs], list[tuple[Tensor, Tensor]]]:
        """Return calls, and logits with and without a cache: of a prompt, with a further token, of the longest text."""
        count, length = tokens.shape
        (number, heads, features), dtype = self._sizes(tokens)
        empty = tokens.new_zeros(count, number, heads, self.max_length, features, dtype=dtype)
        prompt: Inputs = (tokens, empty, empty.clone(), torch.tensor(0, device=tokens.device)), {}
        decoded = self(*prompt[0])
        keys, values = (empty.clone() for _ in range(2))
        keys[..., :length, :], values[..., :length, :] = decoded.new_keys, decoded.new_values
        following, position = decoded.logits.argmax(-1, keepdim=True), torch.tensor(length, device=tokens.device)
        step: Inputs = (following, keys, values, position), {}
        longest = tokens.repeat(1, self.max_length // length + 1)[:, : self.max_length]
        pairs = [
            (decoded.logits, self._logits(tokens)),
            (self(*step[0]).logits, self._logits(torch.cat([tokens, following], 1))),
            (self(longest[:, length:], keys, values, position).logits, self._logits(longest)),
        ]
        return [prompt, step], pairs

    def _sizes(self, tokens: Tensor) -> tuple[tuple[int, int, int], torch.dtype]:
        """Return L, M and F, and the dtype of keys and values."""
        if not self.is_of_transformers:
            blocks: Any = self.model.blocks
            attention = blocks[0].attention
            return (len(blocks), attention.num_key_value_heads, attention.head_dim), next(self.model.parameters()).dtype
        cache = getattr(self.model(tokens, use_cache=True), "past_key_values", None)
        layers = getattr(cache, "layers", [])
        found: list[Any] = [getattr(layer, which, None) for layer in layers for which in ("keys", "values")]
        if not found or not all(isinstance(one, Tensor) and one.shape == found[0].shape for one in found):
            raise TypeError(
                f"{type(self.model).__name__} keeps something else than keys and values of one shape in all layers"
            )
        return (len(layers), found[0].shape[1], found[0].shape[3]), found[0].dtype

    def _logits(self, tokens: Tensor) -> Tensor:
        options = {"use_cache": False} if self.is_of_transformers else {}
        last: Tensor = self.model(tokens, **options).logits[:, -1]
        return last


def _parameters_of_forward(module: nn.Module) -> set[str]:
    return set() if isinstance(module, torch.jit.ScriptModule) else set(inspect.signature(module.forward).parameters)


def _takes_cache(module: nn.Module) -> bool:
    found = _parameters_of_forward(module)
    return found >= _CACHE_OF_TRANSFORMERS or "caches" in found


def _is_language_model(module: nn.Module) -> bool:
    """Return whether a module takes a cache and gives logits of tokens; bodies of transformers only take a cache."""
    can_generate = getattr(module, "can_generate", lambda: False)
    return _takes_cache(module) and ("caches" in _parameters_of_forward(module) or bool(can_generate()))


@cache
def _layer_class() -> type:
    """Return a class of caches of one layer, for transformers if it is installed, and for this package."""
    static: Any = object
    with suppress(ModuleNotFoundError):
        static = require_module("transformers.cache_utils").StaticLayer

    class Layer(static):  # type: ignore[misc]
        """Give attention the keys and values of a cache, with those of new tokens in their places, and keep the new."""

        def __init__(self, keys: Tensor, values: Tensor, length: Tensor) -> None:
            if static is not object:
                super().__init__(max_cache_len=keys.shape[2])
            self.keys, self.values, self.cumulative_length = keys, values, length
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
            self.new: tuple[Tensor, Tensor] | None = None

        @property
        def length(self) -> Tensor:
            return self.cumulative_length

        def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.new = keys, values
            places = self.cumulative_length + torch.arange(keys.shape[2], device=keys.device)
            self.cumulative_length = self.cumulative_length + keys.shape[2]
            return self.keys.index_copy(2, places, keys), self.values.index_copy(2, places, values)

        append = update

    return Layer


def tokens_of(call: Inputs, max_length: int) -> Tensor:
    """Return the tokens (B, T) of a call of a language model, without those that leave no place for a further one.

    Raises:
        TypeError: if the call has no integers (B, T).
    """
    args, kwargs = call
    given = [kwargs["input_ids"]] if "input_ids" in kwargs else [*args, *kwargs.values()]
    for one in given:
        if isinstance(one, Tensor) and one.dim() == 2 and one.dtype == torch.int64:
            return one[:, : max_length - 1]
    raise TypeError("max_length is for language models, which are called with tokens, int64 (B, T)")
