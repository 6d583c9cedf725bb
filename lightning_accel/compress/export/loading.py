"""Loading of files of :func:`lightning_accel.compress.export`, without pickle. Shapes: B samples, C classes."""

import json
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lightning_accel.ops  # noqa: F401  # its operators, which a program of ours may call
from lightning_accel._private.torch import has_vnni, traced_inputs
from lightning_accel.compress.autotuning import autotuned, compile_frozen
from lightning_accel.compress.export.archive import METADATA, checked_archive, load_program, read_graph
from lightning_accel.compress.export.structure import named_tensors, plain_values, rebuild
from lightning_accel.compress.quantization.form import Compiled
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.tracing import to_float32
from lightning_accel.ops.bounds import local_path
from lightning_accel.ops.extras import require_module
from lightning_accel.ops.token_sampling import draw_tokens

FORMAT_VERSION = 1
_KEYS = ("format_version", "arguments", "inputs", "plain_inputs", "outputs", "output_names", "probabilities")
_OF_TORCHAO = b"quantized_decomposed", b"torchao"


class Compressed:
    """Run a model loaded from a file, with the arguments of its ``forward``.

    Attributes:
        metadata: metadata of the file: ``inputs`` with names, dtypes and shapes, ``output_names``, versions, and the
            user's own under ``metadata``.
        class_names: names of the classes, in order, if the file has them.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], run: Callable[[dict[str, Tensor]], Any]) -> None:
        self.path = path
        self.metadata = metadata
        self.class_names: list[str] | None = metadata.get("class_names")
        self._run = run

    def __repr__(self) -> str:
        inputs = ", ".join(map(_describe_spec, self.metadata["inputs"]))
        return f"{type(self).__name__}({str(self.path)!r}: {inputs} -> {', '.join(self.metadata['output_names'])})"

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``forward``, with dataclasses as NamedTuples and None for outputs not in the file.

        Raises:
            TypeError: if arguments are missing, or have another dtype than the file takes.
            ValueError: if a tensor has another shape.
        """
        outputs = self._run(self._tensors(args, kwargs))
        tensors = dict(zip(self.metadata["output_names"], outputs, strict=True))
        return rebuild(self.metadata["outputs"], tensors)

    def predict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Predict the most probable class of each sample.

        Returns:
            ``class``, the names, or indices (B,) if the file has no names; ``probability`` of these, (B,); and all
            ``probabilities``, (B, C).

        Raises:
            TypeError: if the first output does not have one score per sample and class.
        """
        output = self(*args, **kwargs)
        scores = next(value for value in named_tensors(output).values())
        if scores.dim() != 2 or (self.class_names is not None and scores.shape[1] != len(self.class_names)):
            names = "" if self.class_names is None else f" and {len(self.class_names)} class names"
            raise TypeError(
                f"predict is for a first output with a score for each row and class; {self.path} gives "
                f"{tuple(scores.shape)}{names}. Call it as a function for what it gives"
            )
        probabilities = scores if self.metadata["probabilities"] else scores.softmax(dim=1)
        probability, label = probabilities.max(dim=1)
        names_of = self.class_names
        label_names = label if names_of is None else [names_of[number] for number in label.tolist()]
        return {"class": label_names, "probability": probability, "probabilities": probabilities}

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        sample_from: int = 0,
        end_token: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw tokens after prompts, one by one, from the file of a :class:`CachedDecoder`.

        Args:
            tokens: prompts of equal length, (B, T) int64.
            max_new_tokens: number of tokens to add at most.
            temperature: divides the scores; 0 takes the most probable token.
            sample_from: draw from this many of the most probable tokens; 0 for all.
            end_token: token that ends a text; the rest of its row is filled with it.
            generator: random number generator.

        Returns:
            (B, T + ``max_new_tokens``), or fewer if all texts ended.

        Raises:
            TypeError: if the file is not that of a CachedDecoder.
            ValueError: if the texts would be longer than the cache, or ``tokens`` has no token.
        """
        shapes = {spec["name"]: spec["shape"] for spec in self.metadata["inputs"]}
        dtypes = {spec["name"]: getattr(torch, spec["dtype"]) for spec in self.metadata["inputs"]}
        if list(shapes) != ["tokens", "keys", "values", "position"]:
            raise TypeError(
                f"{self.path} keeps no keys and values of previous tokens, by which texts are continued; export a "
                "CachedDecoder of the model, or give Export a max_length"
            )
        length = shapes["keys"][3]
        if tokens.dim() != 2 or tokens.shape[1] < 1 or max_new_tokens < 0:
            raise ValueError(
                f"need prompts (B, T) of at least one token, to be continued by 0 tokens or more; got "
                f"{tuple(tokens.shape)} and {max_new_tokens}"
            )
        if tokens.shape[1] > length - max_new_tokens:
            raise ValueError(
                f"{self.path} takes texts of up to {length} tokens; got prompts (B, T) {tuple(tokens.shape)} to be "
                f"continued by {max_new_tokens}. Export with a larger max_length"
            )
        keys, values = (
            torch.zeros(len(tokens), *shapes[name][1:], dtype=dtypes[name], device=tokens.device)
            for name in ("keys", "values")
        )
        start, new = 0, tokens
        has_ended = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            decoded = self(new, keys, values, torch.tensor(start, device=tokens.device))
            stop = start + new.shape[1]
            keys[..., start:stop, :], values[..., start:stop, :] = decoded.new_keys, decoded.new_values
            start, new = stop, draw_tokens(decoded.logits.float(), temperature, sample_from, generator)
            if end_token is not None:
                new = new.masked_fill(has_ended, end_token)
                has_ended |= new == end_token
            tokens = torch.cat([tokens, new], dim=1)
            if has_ended.all():
                break
        return tokens

    def _tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        names = self.metadata["arguments"]
        specs = self.metadata["inputs"]
        if len(args) > len(names):
            raise TypeError(f"{self.path} takes {len(names)} arguments, {', '.join(names)}; got {len(args)}")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if name not in self.metadata.get("unused_inputs", ())}
        required = self.metadata.get("required", ())  # older files do not tell
        if missing := [name for name in required if name in names and name not in given]:
            values = {
                path: value
                for path, value in self.metadata["plain_inputs"].items()
                if path.partition(".")[0] in missing
            }
            owners = {path.partition(".")[0] for path in values}
            if owners == {*missing}:  # else tensors are missing, which is told below
                known = ", ".join(f"{path}={value!r}" for path, value in values.items())
                raise TypeError(
                    f"{self.path} was exported with {known}, which forward requires or has another default of; pass "
                    "what it was"
                )
        tensors = named_tensors(given)
        if list(tensors) != [spec["name"] for spec in specs]:
            ordered = {spec["name"]: tensors[spec["name"]] for spec in specs if spec["name"] in tensors}
            if len(ordered) < len(specs) or len(tensors) > len(specs):
                wanted = ", ".join(map(_describe_spec, specs))
                raise TypeError(f"{self.path} takes {wanted}; got {', '.join(tensors) or 'no tensor'}")
            tensors = ordered
        for name, value in plain_values(given).items():
            fixed = self.metadata["plain_inputs"].get(name)
            if value != fixed:
                raise ValueError(f"{self.path} was exported with {name}={fixed!r}, which is fixed; got {value!r}")
        for spec in specs:
            _require_spec(tensors[spec["name"]], spec, self.path)
        return tensors


def load_compressed(path: str | os.PathLike[str], *, compiled: bool = False) -> Compressed:
    """Read a file that :func:`lightning_accel.compress.export` or the callback ``Export`` wrote.

    Nothing in it is unpickled, evaluated or imported: a program of ``torch.export`` is checked before torch reads it.

    Args:
        path: ``.pt2`` or ``.onnx`` file.
        compiled: compile a program of ``torch.export`` at its first call, which quantized ones need to be fast, once
            for all sizes of inputs; programs with quantized convolutions once for each size, up to 16. One that was
            quantized on a CPU with VNNI stays uncompiled on CPUs without, with a warning: sums of its products
            would overflow. ONNX Runtime does not check this: quantize for it on a CPU like the one that runs the file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is of another kind, damaged, of a newer version, or contains anything that
            :func:`lightning_accel.compress.export` does not write, such as machine code.
        ModuleNotFoundError: if the package to run it is missing.
    """
    path = local_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    if not zipfile.is_zipfile(path):
        return _load_onnx(path)
    names = _names_in(path)
    if any("/aotinductor/" in name for name in names):
        raise ValueError(
            f"{path} holds machine code, which can do whatever you can. If you trust whoever made it, load it with "
            "torch._inductor.aoti_load_package"
        )
    if not any(name.endswith("models/model.json") for name in names):
        raise ValueError(f"{path} is no program of torch.export or ONNX; a checkpoint is not exported yet")
    if not any(name.endswith(f"/extra/{METADATA}") for name in names):
        _read_metadata("", path)
    return _load_program(path, compiled)


def _names_in(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}. Export the model again") from error


def _load_program(path: Path, compiled: bool) -> Compressed:
    archive = checked_archive(path)
    if any(operators in read_graph(archive) for operators in _OF_TORCHAO):
        require_module("torchao.quantization.pt2e")  # registers them
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The given buffer is not writable", category=UserWarning
        )  # torch's own
        program, text = load_program(archive, path)
    module: Any = program.module(check_guards=False)
    about = _read_metadata(text, path)
    if compiled and not has_vnni() and _has_inputs_of_8_bits(program):
        warnings.warn(
            f"{path} was quantized on a CPU with VNNI; compiled on this one, which has none, its int8 products would "
            "overflow. It runs uncompiled, with right results but slowly; quantize the model on this CPU for speed",
            stacklevel=3,
        )
    elif compiled:
        module = _Compiled(module)
    return Compressed(path, about, lambda tensors: module(*tensors.values()))


class _Compiled:
    """Compile a program at its first call, for calls of all sizes; where that fails, for each size.

    Inductor cannot compile quantized convolutions for all sizes: the layout of their outputs is not the one it expects.
    Through dynamo the weights would be no constants, of which quantized convolutions cannot be compiled at all.
    """

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        self.graph = graph
        self.run: Callable[..., Any] | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        try:
            self.run = self.run or self._compile(tensors)
            return self.run(*tensors)
        except Exception:  # compilers raise all kinds of exceptions
            if isinstance(self.run, Compiled):
                raise
            self.run = Compiled(self.graph)
            return self.run(*tensors)

    def _compile(self, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        unknown = traced_inputs(self.graph)
        with suppress_output():
            plain = compile_frozen(self.graph, unknown)
            plain(*tensors)
            return autotuned(self.graph, tensors, plain, lambda: compile_frozen(self.graph, unknown, True))


def _has_inputs_of_8_bits(program: torch.export.ExportedProgram) -> bool:
    """Return whether a program rounds inputs of layers to all of uint8."""
    rounding = (node.args[-3:] for node in program.graph.nodes if ".quantize_per_tensor" in str(node.target))
    return (0, 255, torch.uint8) in rounding


def onnx_session(model: Path | bytes, providers: list[str]) -> Any:
    """Return an ``onnxruntime.InferenceSession`` that has as many threads as torch, and logs errors alone."""
    onnxruntime: Any = require_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=providers)


def _load_onnx(path: Path) -> Compressed:
    onnxruntime: Any = require_module("onnxruntime")
    try:
        session = onnx_session(path, onnxruntime.get_available_providers())
    except Exception as error:
        raise ValueError(
            f"{path} is neither a whole .pt2 nor an ONNX file that onnxruntime {onnxruntime.__version__} can run: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    text = session.get_modelmeta().custom_metadata_map.get(METADATA, "")
    about = _read_metadata(text, path)
    used = [one.name for one in session.get_inputs()]  # inputs that no output depends on are missing
    renamed, kept = about.get("onnx_inputs", {}), about.get("onnx_outputs")  # of older files
    dtypes = [getattr(torch, name) for name in about.get("onnx_dtypes", [])]  # float32 in the file for those of 16 bits

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        given = {name: tensors[renamed.get(name, name)] for name in used}
        given = to_float32(given) if dtypes else given
        feed = {name: value.detach().cpu().numpy() for name, value in given.items()}
        outputs = [torch.from_numpy(value) for value in session.run(None, feed)]
        outputs = outputs if kept is None else [outputs[place] for place in kept]
        return [value.to(dtype) for value, dtype in zip(outputs, dtypes, strict=True)] if dtypes else outputs

    return Compressed(path, about, run)


def _read_metadata(text: str, path: Path) -> dict[str, Any]:
    if not text:
        raise ValueError(
            f"{path} was not written by lightning_accel: it says nothing of its inputs. Load it with torch.export.load "
            "or onnxruntime.InferenceSession"
        )
    try:
        about: dict[str, Any] = json.loads(text)
        missing = [key for key in _KEYS if key not in about]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} was changed: what it says of itself is no JSON that was written here") from error
    if missing or not isinstance(about["format_version"], int):
        raise ValueError(f"{path} was changed: it does not say its {', '.join(missing) or 'format_version, a number'}")
    if about["format_version"] > FORMAT_VERSION:
        raise ValueError(
            f"{path} was written by lightning_accel {about['lightning_accel']} in version {about['format_version']} of "
            f"its files; this one reads up to {FORMAT_VERSION}. Upgrade it"
        )
    return about


def _require_spec(value: Tensor, spec: Mapping[str, Any], path: Path) -> None:
    shape = spec["shape"]
    if str(value.dtype) != f"torch.{spec['dtype']}":
        raise TypeError(f"{path} takes {_describe_spec(spec)}; got {spec['name']} of {value.dtype}")
    fits = value.dim() == len(shape) and all(size in (None, own) for size, own in zip(shape, value.shape, strict=True))
    if not fits:
        raise ValueError(f"{path} takes {_describe_spec(spec)}; got {spec['name']} {tuple(value.shape)}")


def _describe_spec(spec: Mapping[str, Any]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in spec["shape"])
    return f"{spec['name']} ({sizes}) {spec['dtype']}"
