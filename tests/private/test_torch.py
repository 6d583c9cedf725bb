"""Private names of torch, each of which does what its function in ``_private.torch`` says in the installed version."""

import contextlib
import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel._private import torch as private
from lightning_accel.planning.simulated_group import simulated_world


def test_bases_have_all_layers_of_their_kind():
    assert issubclass(nn.BatchNorm2d, private.BatchNormBase)
    assert issubclass(nn.SyncBatchNorm, private.BatchNormBase)
    assert not issubclass(nn.InstanceNorm1d, private.BatchNormBase)
    assert issubclass(nn.InstanceNorm1d, private.NormBase)
    assert issubclass(nn.BatchNorm1d, private.NormBase)
    assert issubclass(nn.Conv3d, private.ConvBase)
    assert issubclass(nn.ConvTranspose1d, private.ConvTransposeBase)
    assert not issubclass(nn.Conv1d, private.ConvTransposeBase)


def test_trees():
    tree = {"a": [1, (2, None)], "b": 3}
    leaves, spec = private.tree_flatten(tree)
    assert isinstance(spec, private.TreeSpec)
    assert leaves == private.tree_leaves(tree) == [1, 2, None, 3]
    assert private.tree_unflatten(leaves, spec) == tree
    assert private.tree_map(str, tree) == {"a": ["1", ("2", "None")], "b": "3"}
    assert private.tree_map_only(int, lambda one: -one, tree) == {"a": [-1, (-2, None)], "b": -3}


def test_dispatch_mode_and_arguments_of_operations():
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append([one.name for one in private.arguments_of(func)])
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert seen[-1] == ["self", "other", "alpha"]


def test_replaced_kernels():
    x = torch.arange(4.0)
    before = x.cos()
    restore = private.replace_cpu_kernel("cos", lambda keys, x: x + 1, "CPU")
    try:
        assert x.cos().tolist() == [1, 2, 3, 4]
        assert torch.cos(x.to("meta")).device.type == "meta"
    finally:
        restore()
    assert torch.equal(x.cos(), before)


def test_change_count():
    x = torch.zeros(2)
    before = private.change_count(x)
    x += 1
    assert private.change_count(x) == before + 1
    assert private.change_count(x.view(1, 2)) == before + 1


def test_gradient_hooks():
    parameter = nn.Parameter(torch.zeros(2))
    assert not private.has_gradient_hooks(parameter)
    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        assert private.has_gradient_hooks(parameter)
        handle.remove()
        assert not private.has_gradient_hooks(parameter)


def test_products_in_place():
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    private.multiply_(tensors, torch.tensor(2.0))
    assert [one.tolist() for one in tensors] == [[2, 4], 6]
    found = torch.zeros(1)
    private.unscale_gradients_(tensors, found, torch.tensor(0.5))
    assert [one.tolist() for one in tensors] == [[1, 2], 3]
    assert not found
    private.unscale_gradients_([torch.tensor([1.0, float("nan")])], found, torch.tensor(0.5))
    assert found


def test_int8_products_are_summed_in_int32():
    a = torch.full((32, 32), 100, dtype=torch.int8)
    assert private.multiply_int8(a, a).tolist() == [[320000] * 32] * 32


def test_dropouts_have_one_base():
    assert issubclass(nn.Dropout2d, private.DropoutBase)
    assert not issubclass(nn.Linear, private.DropoutBase)


@pytest.mark.slow
def test_compilations_are_explained(capsys):
    def broken(x):
        x = x + 1
        print("told")
        return x + 1

    explained = private.explain_compilation(broken, torch.ones(1))
    assert len(explained.break_reasons) == 1
    assert explained.break_reasons[0].user_stack[-1].name == "broken"
    before = private.num_compiled_graphs()
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert private.num_compiled_graphs() == before + 1


def test_profiles_have_trees_of_calls_with_lines():
    def adds(x):
        return torch.add(x, 1)

    with private.profile_with_stacks([torch.profiler.ProfilerActivity.CPU]) as profiled:
        adds(torch.ones(1))
    events = list(private.event_tree(profiled))
    for event in events:
        events += event.children
    (event,) = [event for event in events if event.name == "aten::add"]
    assert event.duration_time_ns >= 0
    assert isinstance(event.extra_fields.sequence_number, int)
    assert event.parent.extra_fields.caller.line_number == adds.__code__.co_firstlineno + 1
    assert event.parent.parent.extra_fields.callsite.function_name == "adds"


@pytest.mark.slow
def test_compilations_have_reasons():
    call = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    call(torch.ones(2)), call(torch.ones(3))
    first, second = private.compilations()[-2:]
    assert first.recompile_reason is None
    assert "size mismatch" in second.recompile_reason
    assert second.start_time * 1e6 + second.duration_us > first.start_time * 1e6 + first.duration_us > 0


def test_transforms():
    assert not private.in_transform()
    assert torch.vmap(lambda x: x + private.in_transform())(torch.zeros(2)).tolist() == [1, 1]


def test_grouped_products():
    assert private.grouped_mm().default.name() == "aten::_grouped_mm"


def test_what_was_compiled():
    layer = nn.Linear(2, 2)
    assert private.compiled_original(layer) is None
    assert private.compiled_original(torch.compile(layer)) is layer
    assert private.compiled_call(layer) is None
    layer.compile(backend="eager")
    assert private.compiled_call(layer) is not None
    private.set_compiled_call(layer, lambda x: x + 1)
    assert layer(torch.zeros(1)).item() == 1
    private.set_compiled_call(layer, None)
    layer.register_forward_hook(lambda *_: "hooked")
    assert private.plain_call(layer)(torch.zeros(2)) == layer(torch.zeros(2)) == "hooked"


@pytest.mark.slow
def test_compiled_graphs_have_constant_weights():
    """Weights that change after the compilation no longer count."""
    layer, x = nn.Linear(2, 2).eval(), torch.ones(1, 2)
    with torch.no_grad():
        expected = layer(x)
        graph = torch.export.export(layer, (x,), strict=False).module()
        run = private.compile_graph(graph, [x], {"freezing": True})
        for parameter in graph.parameters():
            parameter.data = parameter + 1
        torch.testing.assert_close(run(x), expected)


@pytest.mark.slow
def test_constants_of_compiled_graphs_are_freed_with_them():
    """Inductor keeps the modules that it generates, with their constants, as long as the process lives."""
    layer, x = nn.Linear(29, 31).eval(), torch.ones(2, 29)
    with torch.no_grad():
        graph = torch.export.export(layer, (x,), strict=False).module()
        run = private.compile_graph(graph, [x], {"freezing": True})
        torch.testing.assert_close(run(x), layer(x))
    del graph
    assert _num_tensors(31 * 29) > 1
    torch.testing.assert_close(run(x), layer(x))  # its functions hold them
    del run
    assert _num_tensors(31 * 29) == 1  # the layer's own


def _num_tensors(size):
    gc.collect()
    return sum(type(one) in (torch.Tensor, nn.Parameter) and one.numel() == size for one in gc.get_objects())


def test_inputs_of_unknown_sizes_of_a_program_from_a_file(tmp_path):
    class Repeats(nn.Module):
        def forward(self, x):
            return torch.cat([x, x + 1], 1).transpose(0, 1).reshape(2, -1)

    x = torch.rand(3, 4)
    program = torch.export.export(Repeats(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC, 1: None},))
    torch.export.save(program, tmp_path / "m.pt2")
    graph = torch.export.load(tmp_path / "m.pt2").module()
    (node,) = [one for one in graph.graph.nodes if one.op == "placeholder"]
    values = node.meta["val"].fake_mode.shape_env.backed_var_to_val
    assert any(not size.is_Symbol for size in values)
    (found,) = private.traced_inputs(graph)
    assert found.shape[1] == 4
    assert not isinstance(found.shape[0], int)
    assert all(size.is_Symbol for size in values)


@pytest.mark.slow
def test_frozen_weights():
    layer, x = nn.Linear(2, 2).eval(), torch.ones(1, 2)
    compiled = torch.compile(layer)
    with torch.no_grad(), private.frozen_weights():
        expected = compiled(x)
        layer.weight.data = layer.weight + 1
        torch.testing.assert_close(compiled(x), expected)


def test_frozen_weights_is_an_option_of_inductor():
    from torch._inductor import config

    before = config.freezing
    with private.frozen_weights():
        assert config.freezing is True
    assert config.freezing is before


def test_tables_of_modules():
    module = nn.Sequential(shared := nn.Linear(1, 1, bias=False), shared)
    assert private.children_of(module) == {"0": shared, "1": shared}
    private.children_of(module)["1"] = None
    assert module[1] is None
    assert private.parameters_of(shared) == {"weight": shared.weight, "bias": None}
    private.parameters_of(shared)["weight"] = local = torch.ones(1, 1)
    assert shared.weight is local
    norm = nn.BatchNorm1d(1, track_running_stats=False)
    assert private.buffers_of(norm)["running_mean"] is None


def test_replicas_share_no_tables():
    layer = nn.BatchNorm1d(2)
    replica = private.replicate(layer)
    assert type(replica) is type(layer)
    private.parameters_of(replica)["weight"] = None
    private.buffers_of(replica)["running_mean"] = None
    private.children_of(replica)["more"] = None
    assert layer.weight is not None
    assert layer.running_mean is not None
    assert not list(layer.named_children())


def test_tensors_are_replaced_with_their_gradients():
    layer = nn.Linear(2, 2)
    private.apply_to_tensors_(layer, lambda one: one.double())
    assert layer.weight.dtype == torch.float64


def test_convolutions_keep_their_padding():
    layer = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")
    x = torch.randn(1, 1, 4)
    torch.testing.assert_close(private.convolve(layer, x, layer.weight), layer(x))
    twice = copy.deepcopy(layer)
    twice.weight.data *= 2
    torch.testing.assert_close(private.convolve(layer, x, 2 * layer.weight), twice(x))


def test_batch_norms_check_their_input():
    private.check_input_dims(nn.BatchNorm2d(2), torch.zeros(1, 2, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        private.check_input_dims(nn.BatchNorm2d(2), torch.zeros(1, 2))


def test_step_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    registers = (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    )
    for register in registers:
        assert not private.has_step_hooks(optimizer)
        handle = register(lambda *_: None)
        assert private.has_step_hooks(optimizer)
        handle.remove()


def test_steps_counted_by_schedules():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1)
    assert not private.is_counted_by_schedule(optimizer.step)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert private.is_counted_by_schedule(optimizer.step)


def test_loss_scales():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1), torch.amp.GradScaler("cpu", init_scale=4.0)
    assert private.scale_of(scaler) is None
    scaler.scale(parameter.sum()).backward()
    assert private.scale_of(scaler).item() == 4
    scaler.unscale_(optimizer)
    assert list(private.found_inf_by_device(scaler, optimizer)) == [torch.device("cpu")]
    private.found_inf_by_device(scaler, optimizer)[torch.device("cpu")] += 1
    scaler.step(optimizer)
    assert parameter.tolist() == [1, 1]  # skipped


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_workers_that_are_waited_for(num_workers):
    data = TensorDataset(torch.zeros(4))
    batches = iter(DataLoader(data, num_workers=num_workers))
    assert isinstance(batches, private.LoaderIterator)
    assert private.dataset_of(batches) is data
    awaited = private.awaited_worker(batches)
    assert (awaited is not None) == bool(num_workers)
    assert awaited is None or (awaited[0] == 0 and awaited[1].is_alive())


def test_groups_of_processes(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        private.default_store().set("key", "value")
        assert private.default_store().get("key") == b"value"
        x = torch.ones(3, 2, requires_grad=True)
        private.all_to_all(2 * x, [3], [3], dist.group.WORLD).sum().backward()
        assert x.grad.tolist() == [[2, 2]] * 3
    finally:
        dist.destroy_process_group()


def test_groups_in_python():
    with simulated_world(2, lambda *called: None):
        group = torch.distributed.group.WORLD
        assert private.name_of_group(group)
        assert private.group_of(private.name_of_group(group)) is private.group_of(group) is group
    assert private.name_of_group(group) == ""
    future = torch.futures.Future()
    future.set_result(None)
    assert private.finished_work(future).wait()


def test_operations_of_a_step():
    assert private.returns_of(torch.ops.aten.mul.out)[0].alias_info.is_write
    assert private.packet_of(torch.ops.aten.mm.default) is torch.ops.aten.mm
    names = []

    class Names(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    with Names():
        torch.ones(()).item()
    assert private.number_read() in names
    assert not any(map(private.is_functional_collective, names))
    assert private.is_functional_collective(torch.ops._c10d_functional.all_reduce.default)


def test_operations_of_attention_and_of_grouped_products_are_named():
    query = torch.ones(1, 2, 3, 8, requires_grad=True)
    groups = torch.ones(2, 8, 8, requires_grad=True)
    with torch.profiler.profile() as profiler:
        nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
        nn.functional.grouped_mm(torch.ones(4, 8), groups, offs=torch.tensor([1, 4], dtype=torch.int32))
    names = {event.name for event in profiler.events()}
    assert {f"aten::{one.__name__}" for one in (*private.cpu_attention(), private.grouped_product())} <= names
    with FlopCounterMode(display=False) as counter:
        assert private.efficient_attention() in counter.flop_registry
    arguments = [argument.name for argument in private.arguments_of(private.efficient_attention().default)]
    assert arguments[:5] == ["query", "key", "value", "attn_bias", "compute_log_sumexp"]


def test_storages_are_told_apart():
    x, y = torch.empty(0), torch.empty(0)
    assert private.storage_id(x.untyped_storage()) == private.storage_id(x.view(0, 1).untyped_storage())
    assert private.storage_id(x.untyped_storage()) != private.storage_id(y.untyped_storage())


def test_optimizers_choose_lists_of_tensors_on_the_cpu():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter])
    for chosen in (True, False):
        ways = private.foreach_on_cpu() if chosen else contextlib.nullcontext()
        with ways, torch.profiler.profile() as profiler:
            optimizer.step()
        assert any("_foreach" in event.name for event in profiler.events()) == chosen


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tables_of_distributed_checkpoints(tmp_path):
    from torch.distributed import checkpoint

    checkpoint.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    table = pickle.loads((tmp_path / ".metadata").read_bytes())
    (place,) = table.storage_data.values()
    assert type(place) is private.storage_info()
    assert (place.relative_path, place.offset) == ("__0_0.distcp", 0)
    encoding, get_layout = private.checkpoint_encodings()
    assert encoding(0) is encoding.TORCH_CONTIGUOUS_FORMAT
    assert get_layout("torch.strided") is torch.strided


def test_instructions_of_this_cpu():
    found = private.cpu_capabilities()
    assert found.get("avx512_vnni", False) == torch.cpu._is_vnni_supported()
    for name in ("avx512_bf16", "amx_tile"):
        assert getattr(torch.cpu, f"_is_{name}_supported")() in (True, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lstms_fail_under_autocast_where_onednn_has_no_code_for_the_dtype(dtype):
    with torch.autocast("cpu", dtype=dtype):
        works = private.onednn_has_autocast_dtype()
        with contextlib.nullcontext() if works else pytest.raises(RuntimeError, match="descriptor for the LSTM"):
            nn.LSTM(3, 4)(torch.randn(5, 2, 3))


@pytest.mark.slow
def test_compiled_classes_of_torch_and_their_random_numbers(compiler):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    with private.wrapped_frames():
        module.compile()
    fallback, limit = torch._inductor.config.fallback_random, torch._dynamo.config.recompile_limit
    try:
        private.draw_as_eager()
        private.allow_recompilations(limit + 1)
        assert torch._dynamo.config.recompile_limit == limit + 1
        private.allow_recompilations(1)
        assert torch._dynamo.config.recompile_limit == limit + 1
        torch.manual_seed(0)
        compiled = module(torch.ones(3, 4))
        torch.manual_seed(0)
        torch.testing.assert_close(compiled, module.forward(torch.ones(3, 4)))
    finally:
        torch._inductor.config.fallback_random, torch._dynamo.config.recompile_limit = fallback, limit
    assert graphs["unique_graphs"] > before


def test_iterators_of_a_changed_loader():
    def change(copied):
        copied.collate_fn = sum

    loader = DataLoader([1, 2, 3], batch_size=2)
    assert not private.makes_own_iterators(loader)
    private.change_iterators(loader, change)
    assert list(loader) == [3, 3]
    assert not private.makes_own_iterators(loader)
    own = type("Own", (DataLoader,), {"_get_iterator": lambda self: iter("ab")})([1])
    assert private.makes_own_iterators(own)
    assert list(own) == ["a", "b"]


@pytest.mark.slow
def test_forgotten_workers_are_started_anew():
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
    before = iter(loader)
    assert iter(loader) is before
    private.forget_workers(loader)
    assert iter(loader) is not before
