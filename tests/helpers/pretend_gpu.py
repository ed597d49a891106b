"""A GPU that is not there: tensors that claim to be on cuda:0, fail where CUDA's do, and are
computed on the CPU.

To PyTorch's C++ they are on `meta`, which the rest of this project does not use: so what is made
from them is known to be on the GPU as well, and backward passes need no driver. It cannot imitate
single kernels of CUDA, asynchronous errors and NCCL.
"""

import contextlib
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten, CUDA = torch.ops.aten, torch.device('cuda:0')
MEMORY = 40 << 30  # bytes that it has
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)

# By autocast, of what networks here are made of
HALVED = {torch.addmm, torch.baddbmm, torch.bmm, F.linear, F.scaled_dot_product_attention}
WHOLE = {F.layer_norm, torch.softmax, torch.Tensor.softmax, torch.Tensor.sum}


class Tensor(torch.Tensor):
    """A tensor on the GPU. `host` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_cuda, is_meta = (
        property(lambda self, value=value: value) for value in (CUDA, True, False)
    )

    @staticmethod
    def __new__(cls, host):
        place = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device='meta')
        self = torch.Tensor._make_subclass(cls, place, device_for_backend_keys=CUDA)
        self.host = host
        return self

    def numpy(self, *, force=False):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor"
            ' to host memory first.'
        )

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


def leaves(values):
    """Yield all that is in nested tuples, lists and dictionaries, faster than PyTorch's own."""
    if type(values) in (tuple, list):
        return [leaf for value in values for leaf in leaves(value)]
    if type(values) is dict:
        return leaves([*values.values()])
    return [values]


def mapped(function, values):
    """`values`, nested as those of `leaves`, with function(leaf) in the place of each leaf."""
    if type(values) in (tuple, list):
        return type(values)([mapped(function, value) for value in values])
    if type(values) is dict:
        return {name: mapped(function, value) for name, value in values.items()}
    return function(values)


def _compute(func, args, kwargs):
    """Return the result of an operator, on the GPU if an argument is or if it is asked to be."""
    tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    if there:
        _refuse(func, args, tensors)
    on_gpu = bool(there)
    if kwargs.get('device') is not None:
        on_gpu = torch.device(kwargs['device']).type != 'cpu'
        kwargs = {**kwargs, 'device': 'cpu'}
    args, kwargs = mapped(
        lambda leaf: leaf.host if isinstance(leaf, Tensor) else leaf, (args, kwargs)
    )
    with GPU.current.drawing(func, kwargs) if on_gpu else contextlib.nullcontext():
        results = func(*args, **kwargs)

    def placed(leaf):
        if id(leaf) in there:  # by an operation in place
            return there[id(leaf)]
        return Tensor(leaf) if on_gpu and isinstance(leaf, torch.Tensor) else leaf

    return mapped(placed, results)


def _refuse(func, args, tensors):
    """Raise RuntimeError where CUDA's operators take no such tensors."""
    packet = func.overloadpacket
    strangers = [tensor for tensor in tensors if not isinstance(tensor, Tensor)]
    is_first_there = isinstance(args[0], Tensor)
    if packet in INDEXING and is_first_there:
        indices = set(map(id, leaves(args[1])))  # may be on the CPU
        strangers = [each for each in strangers if each.dim() and id(each) not in indices]
    elif packet is aten.copy_:
        strangers = []
    elif torch.Tag.pointwise in func.tags and (is_first_there or not func._schema.is_mutable):
        strangers = [tensor for tensor in strangers if tensor.dim()]
    if strangers:
        raise RuntimeError(
            'Expected all tensors to be on the same device, but found at least two devices, cuda:0'
            f' and cpu! ({func})'
        )
    if packet is aten._fused_adam_:
        for alike in zip(*args[:4], strict=True):
            assert len({(tensor.dtype, tensor.shape, tensor.stride()) for tensor in alike}) == 1


class _Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        """Nothing is compiled here, and to import PyTorch's compiler takes seconds."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Number of the device 'cuda', which a driver would know, and its autocast and tensor()."""

    def __torch_function__(self, func, types, args=(), kwargs=None):

        def numbered(leaf):
            is_device = isinstance(leaf, (str, torch.device)) and str(leaf) == 'cuda'
            return CUDA if is_device else leaf

        def cast(leaf):
            is_cast = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if is_cast and leaf.dtype != torch.float64 else leaf

        args, kwargs = mapped(numbered, (args, kwargs or {}))
        # tensor() asks a driver for memory.
        if func is torch.tensor and kwargs.pop('device', 'cpu') == CUDA:
            return func(*args, **kwargs).to(CUDA)
        if torch.is_autocast_enabled('cuda') and func in HALVED | WHOLE:
            dtype = torch.get_autocast_dtype('cuda') if func in HALVED else torch.float32
            args, kwargs = mapped(cast, (args, kwargs))
            with torch.autocast('cuda', enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _run_backward(*args, run=torch.autograd._engine_run_backward, **kwargs):
    """Run a backward pass in the mode, as it may compute blocks anew."""
    with _Functions():
        return run(*args, **kwargs)


class GPU:
    """The GPU's memory and its random generator, its own unless it is `shared` with the CPU."""

    current = None

    def __init__(self, shared):
        self.shared, self.cached = shared, 0  # bytes that PyTorch keeps for itself
        self.seed(0)

    def seed(self, seed):
        self.state = torch.Generator().manual_seed(seed ^ 0xC0DA).get_state()

    def set_state(self, state, device=None):
        self.state = state.clone()

    @contextlib.contextmanager
    def drawing(self, func, kwargs):
        """Let `func` draw its random numbers from this generator, if it draws any."""
        if kwargs.get('generator') is not None:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if self.shared or torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(before)

    def empty_cache(self):
        self.cached = 0

    def patches(self):
        """Return the functions that replace those of torch.cuda."""
        return dict(
            _lazy_init=lambda: None,
            _initialized=True,
            is_available=lambda: True,
            is_bf16_supported=lambda *_: True,
            get_device_capability=lambda *_: (7, 5),  # without flash attention
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,
            get_device_name=lambda device=None: 'NVIDIA Pretence',
            mem_get_info=lambda device=None: (MEMORY - self.cached, MEMORY),
            max_memory_allocated=lambda device=None: self.cached,
            empty_cache=self.empty_cache,
            get_rng_state=lambda device='cuda': self.state.clone(),
            set_rng_state=self.set_state,
            manual_seed_all=self.seed,
        )


@contextlib.contextmanager
def pretended(shared=False):
    """Give this thread a GPU, which draws from the CPU's generator if `shared`."""
    GPU.current = GPU(shared)
    # Else Module.to keeps the tensor, on other memory.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            mock.patch.multiple(torch.cuda, **GPU.current.patches()),
            _Functions(),
            _Operators(),
            mock.patch.object(torch.autograd, '_engine_run_backward', _run_backward),
        ):
            yield GPU.current
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.backends.cuda.matmul.allow_tf32 = False
