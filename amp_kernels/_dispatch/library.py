"""The op registry: every schema is defined here once, in the one ``torch.library`` of the package.

An op exists on every install: its readable torch *reference* is registered as the composite kernel, so the op also runs on meta
tensors, on devices without a kernel and where nothing could be compiled. The C++ libraries only add implementations for the keys
``CPU`` and ``CUDA`` (one key holds one kernel); Triton's are plain functions that :class:`Op` calls when the policy
(``policy.py``) picks them.

Every op exists a second time in the namespace ``amp_kernels_emulated``, with the same schema and the same rules: there the
key ``CPU`` is served by the CUDA kernels and their glue on the emulator (``tools/emulator``), for debugging and for tests.

The stable ABI does not bump version counters, and neither does Triton, so a mutating op gets an ``ADInplaceOrView`` kernel here
that does: without it, stepping an optimizer between forward and backward would silently give wrong gradients.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from .._checks import lists
from .._checks.operands import check_no_internal_overlap
from . import flops, load, memory, nodes, policy, walks

NAMESPACE = "amp_kernels"
EMULATED = f"{NAMESPACE}_emulated"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
EMULATED_LIBRARY = torch.library.Library(EMULATED, "DEF")
REGISTRY: dict[str, Op] = {}

Sample = tuple[tuple[Any, ...], dict[str, Any]]


class Op:
    """One op: its schema, its reference and the choice of a backend at each call.

    Call it as ``op(...)`` within the package: that picks the backend. ``op.overload(...)`` is the op as torch's dispatcher sees it.
    """

    def __init__(
        self,
        schema: str,
        reference: Callable,
        samples: Callable[[str], Iterable[Sample]] | None,
        *,
        composite: bool = False,
        tensor_cores: bool = False,
        family: str | None = None,
        bound: bool = False,
        check: Callable[[Any], Any] | None = None,
    ):
        self.schema = torch._C.parse_schema(f"{NAMESPACE}::{schema}")
        self.name = self.schema.name.removeprefix(f"{NAMESPACE}::")
        #: The module that defines it, and the module of each backend that has it: ``gemm`` of ops/gemm.py and _triton/gemm.py.
        self.family = family or reference.__module__.rpartition(".")[2]
        self._arguments = namedtuple("Arguments", [argument.name for argument in self.schema.arguments])
        self._defaults = {a.name: a.default_value for a in self.schema.arguments if a.has_default_value()}
        self.reference = self.bound(reference) if bound else reference
        self._check = check and self.bound(check)
        self.samples = samples
        self.composite = composite
        self.tensor_cores = tensor_cores
        self.mutated = tuple(
            (i, argument.name)
            for i, argument in enumerate(self.schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        #: The op as torch's dispatcher sees it.
        self.overload = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        #: Its twin on the emulator.
        self.emulated = None if composite else getattr(getattr(torch.ops, EMULATED), self.name).default
        self._overloads = {"cpu": self.overload, "cuda": self.overload, "emulate": self.emulated}

    def __call__(self, *args, **kwargs):
        """Runs the op on the backend that the policy picks.

        If autograd has nothing to record, as within a ``torch.autograd.Function``, the call skips the Python function at
        autograd's key, which saves some 6 us. Otherwise it goes through the dispatcher, so that a backward
        through a raw op raises.
        """
        tensor = args[0] if args else None
        if type(tensor) not in PLAIN:
            tensor = first_tensor(args)
            if type(tensor) not in PLAIN:  # a subclass (fake, functional, ...) needs the dispatcher
                return self._traced(tensor, args, kwargs)
        if self.composite or torch.compiler.is_compiling():
            return self.overload(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack():
            flops.tell_counters()
        if self.tensor_cores:
            backend = policy.select_product(self, tensor, args, kwargs)
        else:  # policy.select, one call less
            backend = policy._select(self, tensor.device.type, tensor.device.index, policy.requested_backend(), False)
        overload = self._overloads.get(backend)
        try:
            if overload is None:
                function = self.triton if backend == "triton" else _below_autograd(self._in_torch(backend))
                if any(map(_is_zerotensor, args)):
                    args, kwargs = self._with_memory(args, kwargs)
                result = function(*args, **kwargs)
            else:
                if not self.mutated and torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs):
                    return overload(*args, **kwargs)
                with torch._C._AutoDispatchBelowADInplaceOrView():
                    result = overload(*args, **kwargs)
        except RuntimeError as error:
            raise memory.translated(self.name, error) from None
        if self.mutated:
            self._bump_versions(args, kwargs)
        return result

    def in_cpp(self, args: tuple) -> Callable | None:
        """A function without a line of Python that makes this call, below version counters; ``None`` if C++ does not serve it."""
        tensor = first_tensor(args)
        if (
            self.composite
            or type(tensor) not in PLAIN
            or torch.compiler.is_compiling()
            or any(map(_is_zerotensor, args))
        ):
            return None
        overload = self._overloads.get(self._selected(tensor, args, {}))
        return None if overload is None else overload._op

    def bound(self, function: Callable[[Any], Any]) -> Callable:
        """A function with the op's signature from one of a tuple that names all arguments, defaults included."""

        @functools.wraps(function)
        def with_signature(*args, **kwargs):
            given = dict(zip(self._arguments._fields, args, strict=False))
            return function(self._arguments(**(self._defaults | given | kwargs)))

        return with_signature

    def _selected(self, tensor: torch.Tensor, args: tuple, kwargs: dict) -> str:
        if self.tensor_cores:
            return policy.select_product(self, tensor, args, kwargs)
        return policy.select(self, tensor)

    def _traced(self, tensor: Any, args: tuple, kwargs: dict):
        """The op, for a program that is being made; in its place torch's product, if that is what the device gets, or these sizes by
        its profile: the program would run the one kernel that the dispatcher holds."""
        if tensor is None:  # empty lists
            return self.overload(*args, **kwargs)
        here = tensor.device.type == "cpu" or (tensor.device.type == "cuda" and torch.cuda.is_available())
        traced = here and self.tensor_cores and is_traced(tensor)
        if traced and policy.select_product(self, tensor, args, kwargs) == "aten":
            return _below_autograd(self.aten)(*args, **kwargs)
        return self.overload(*args, **kwargs)

    @functools.cached_property
    def triton(self) -> Callable:
        """The function of Triton's backend: it has the op's name and signature, in ``_triton/<family>.py``."""
        return getattr(importlib.import_module(f"{load.PACKAGE.name}._triton.{self.family}"), self.name)

    @functools.cached_property
    def aten(self) -> Callable:
        """The same in ``_aten/<family>.py``, for products."""
        return getattr(importlib.import_module(f"{load.PACKAGE.name}._aten.{self.family}"), self.name)

    def _in_torch(self, backend: str) -> Callable:
        return self.aten if backend == "aten" else self.reference

    @functools.cached_property
    def built(self) -> policy.Built:
        """The op's implementations in this install; touches no device."""
        return policy.Built() if self.composite else policy.built(self.name, self.family, self.tensor_cores)

    def _without_cpp_kernel(self, *args, **kwargs):
        """The op's kernel in the dispatcher where C++ registered none: the policy's choice, else the reference.

        Compiled and exported programs call ops through the dispatcher, so without this an install that has Triton kernels only
        would run its reference there.
        """
        self._check_raw(args, kwargs)
        tensor = first_tensor(args)
        if type(tensor) in PLAIN and not tensor.is_meta:
            backend = self._selected(tensor, args, kwargs)
            if backend == "emulate":
                return self.emulated(*args, **kwargs)
            if backend == "triton":
                return self.triton(*args, **kwargs)
            return self._in_torch(backend)(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def _check_raw(self, args: tuple, kwargs: dict) -> None:
        """Refuse a call of ``torch.ops`` that would read or write beyond a tensor: backends trust the public functions, which check
        before, and the C++ kernels have this check in their glue."""
        first = None
        for name, value in {**dict(zip(self._arguments._fields, args, strict=False)), **kwargs}.items():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(tensor, torch.Tensor) or name == "layout":  # of an update: always on the host
                    continue
                if tensor.layout != torch.strided:
                    raise TypeError(f"{self.name}: {name} has layout {tensor.layout}; accepted: torch.strided")
                first = first or (name, tensor.device)
                if tensor.device != first[1]:
                    raise ValueError(
                        f"{self.name}: {name} is on {tensor.device}, but {first[0]} is on {first[1]}; accepted: one device"
                    )
        if self._check is not None:
            self._check(*args, **kwargs)

    def _bump_versions(self, args, kwargs) -> None:
        tensors = []
        for position, name in self.mutated:
            value = args[position] if position < len(args) else kwargs.get(name)
            tensors += (value,) if isinstance(value, torch.Tensor) else value or ()
        walks.bump_versions(tensors)

    def _adinplaceorview(self, overload: Callable) -> Callable:
        def kernel(*args, **kwargs):
            self._check_written(args, kwargs)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                result = overload(*args, **kwargs)
            self._bump_versions(args, kwargs)
            return result

        return kernel

    def _check_written(self, args: tuple, kwargs: dict) -> None:
        """Refuse two written elements in one place, whichever backend serves the op. Calls of the package do not come here: its
        functions check what users pass, once, where they make their lists."""
        written = [(name, tensor) for name, tensor in self._written(args, kwargs) if tensor.layout == torch.strided]
        for name, tensor in written:
            check_no_internal_overlap(self.name, name, tensor)
        shared = lists.overlap([tensor for _, tensor in written])
        if shared is not None:
            a, b = (written[i][0] for i in shared)
            raise ValueError(f"{self.name}: {a} and {b} share memory; accepted: tensors that do not overlap")

    def _written(self, args: tuple, kwargs: dict) -> list[tuple[str, torch.Tensor]]:
        """The tensors that the call writes, by name."""
        written = []
        for position, name in self.mutated:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                written.append((name, value))
            else:
                written += [(f"{name}[{i}]", tensor) for i, tensor in enumerate(value or ())]
        return written

    def _of_zeros(self, overload: Callable) -> Callable:
        def kernel(*args, **kwargs):
            args, kwargs = self._with_memory(args, kwargs)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return overload(*args, **kwargs)

        return kernel

    def _with_memory(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call with ordinary zeros in place of those that torch keeps no memory for (``torch._efficientzerotensor``)."""
        for position, name in self.mutated:
            value = args[position] if position < len(args) else kwargs.get(name)
            if any(map(_is_zerotensor, value if isinstance(value, (list, tuple)) else [value])):
                raise RuntimeError(f"{self.name}: {name} is torch._efficientzerotensor; accepted: tensors with memory")
        return tuple(map(_with_memory, args)), {key: _with_memory(value) for key, value in kwargs.items()}


def _is_zerotensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and torch._is_zerotensor(value)


def _with_memory(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_with_memory(each) for each in value]
    return torch.zeros_like(value) if _is_zerotensor(value) else value


class KernelOp:
    """A private op that C++ alone implements: no reference, no samples, no autograd, and not in the registry.

    Callers within the package pass checked arguments and bump version counters themselves. Its name begins with an underscore.
    Runs on the emulator if the user chose that backend.
    """

    def __init__(self, schema: str):
        for library in (LIBRARY, EMULATED_LIBRARY):
            library.define(schema)
        name = schema.partition("(")[0]
        self._overloads = [getattr(getattr(torch.ops, namespace), name).default for namespace in (NAMESPACE, EMULATED)]

    def __call__(self, *args):
        overload = self._overloads[policy.requested_backend() == "emulate"]
        try:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return overload(*args)
        except RuntimeError as error:
            raise memory.translated(overload.name(), error) from None

    def in_cpp(self, args: tuple) -> Callable:
        return self._overloads[policy.requested_backend() == "emulate"]._op

    def bound_in_cpp(self, args: tuple, changing: list[float]) -> Callable[[], None]:
        """This call, whose arguments are converted once, but for ``changing``, one of them. Needs the module ``_nodes``."""
        module, schema = nodes.step_walk(), self._overloads[policy.requested_backend() == "emulate"]._schema
        position = next(i for i, value in enumerate(args) if value is changing)
        call = functools.partial(
            module.call_bound, module.bind_call(schema.name, schema.overload_name, args, position), changing
        )

        def translated() -> None:
            try:
                call()
            except RuntimeError as error:
                raise memory.translated(schema.name, error) from None

        return translated


def call_together(calls: Sequence[tuple[Op | KernelOp, tuple]]) -> None:
    """Make calls of ops that write in place. Where C++ serves them all, no line of Python runs from the first to the last, so that
    an interrupt comes before or after them."""
    functions = [op.in_cpp(args) for op, args in calls]
    if not all(functions):
        for op, args in calls:
            op(*args)
        return
    bound = [functools.partial(function, *args) for function, (_, args) in zip(functions, calls, strict=True)]
    run(functools.partial(deque, map(functools.partial.__call__, bound), maxlen=0))
    for op, args in calls:
        if isinstance(op, Op):
            op._bump_versions(args, {})


def run(step: Callable[[], Any]) -> None:
    """Call functions of :meth:`Op.in_cpp` that are bound to the arguments of a step."""
    try:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            step()
    except RuntimeError as error:
        raise memory.translated("step", error) from None


PLAIN = (torch.Tensor, torch.nn.Parameter)  # anything else needs the dispatcher


def is_traced(x: torch.Tensor) -> bool:
    """True if AOTAutograd traces a composite op on ``x``: for torch.compile, or to decompose an exported program.

    Norms and activations then decompose into torch's operations, which the compiler fuses with their neighbours.
    Products and losses stay ops: a compiler has no product with such an epilogue.
    """
    return isinstance(x, FunctionalTensor)


def first_tensor(args: Iterable) -> torch.Tensor | None:
    """The tensor whose device and dtype decide the backend: the first one among the arguments and their lists."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0]
    return None


def define(
    schema: str,
    reference: Callable,
    *,
    samples: Callable[[str], Iterable[Sample]] | None = None,
    composite: bool = False,
    tensor_cores: bool = False,
    flop_count: Callable[..., int] | None = None,
    family: str | None = None,
    bound: bool = False,
    check: Callable[[Any], Any] | None = None,
) -> Op:
    """Define an op of the package and return it.

    Args:
        schema: torch schema without the namespace. Tensor lists come before scalars; mutating ops return nothing; no argument
            is called ``mode`` (functionalization has a parameter of that name).
        reference: readable, branchless torch implementation (no ``.item()``); it also serves meta tensors.
        samples: ``samples(device)`` yields ``(args, kwargs)`` of small, seeded calls that cover dtypes and options, for an op with
            backends: ``python -m amp_kernels info --check`` compares them, and opcheck and the registry tests run over them.
        composite: the reference *is* the implementation, written over other ops of the package, and has its own autograd formula:
            no backend is chosen. A backward through any other op that is out-of-place raises, instead of silently giving no
            gradient.
        tensor_cores: its CUDA kernels are mma.sync (from compute capability 8.0 on) and wgmma (9.0). Such an op takes operands of
            any strides, and its results are contiguous. Inductor must know: otherwise it makes one copy of an operand for each
            product that reads it.
        flop_count: ``(*args, out_shape, **kwargs) -> int`` with shapes in place of tensors, for ``torch.utils.flop_counter``.
        family: the name of the module where each backend keeps the op; ``None`` for that of the module that its reference is
            written in.
        bound: the reference takes one tuple that names all arguments (:meth:`Op.bound`), so that the schema alone lists them.
        check: raises for such a tuple if a kernel would read or write beyond a tensor. Calls of ``torch.ops`` run it where no C++
            kernel is registered; it need not look at devices.
    """
    LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,) if tensor_cores else ())
    if not composite:
        EMULATED_LIBRARY.define(schema)
    op = Op(
        schema,
        reference,
        samples,
        composite=composite,
        tensor_cores=tensor_cores,
        family=family,
        bound=bound,
        check=check,
    )
    if composite:  # decomposes above autograd and fake tensors, as torch's own linear and matmul do
        LIBRARY.impl(op.name, op.reference, "CompositeImplicitAutograd")
    else:
        LIBRARY.impl(op.name, _below_autograd(op._without_cpp_kernel), "CompositeExplicitAutograd")
        EMULATED_LIBRARY.impl(op.name, _below_autograd(op.reference), "CompositeExplicitAutograd")
        for library, overload in ((LIBRARY, op.overload), (EMULATED_LIBRARY, op.emulated)):
            if op.mutated:
                library.impl(op.name, op._adinplaceorview(overload), "ADInplaceOrView")
            else:
                torch.library.register_autograd(overload.name(), _no_formula(op.name), lib=library)
            # Autograd may hand such zeros to a backward. torch's own fallback gives them strides of 0.
            library.impl(op.name, op._of_zeros(overload), "ZeroTensor")
            if flop_count is not None:
                flops.count(overload.overloadpacket, flop_count)
    REGISTRY[op.name] = op
    return op


def decompose_batches(op: Op, rule: Callable | None = None) -> None:
    """torch.vmap runs the composite ``op`` as its reference, or as ``rule``: torch's own operations, which know batches. Without
    it vmap would call the op once for each element, with a warning."""
    LIBRARY.impl(op.name, rule or op.reference, "FuncTorchBatched")


def _below_autograd(function: Callable) -> Callable:
    """A kernel sits below autograd and autocast: the torch ops inside it record no graph, may write to leaves, as C++ kernels do,
    and compute in the dtypes that they are given."""

    def kernel(*args, **kwargs):
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return kernel


def _no_formula(name: str) -> Callable:
    def backward(ctx, *grads):
        raise NotImplementedError(
            f"amp_kernels::{name} is a raw kernel without an autograd formula; call amp_kernels.linear or amp_kernels.matmul, "
            "which are differentiable, or run it under torch.no_grad()"
        )

    return backward
