"""Tensors as objects: a header of 256 bytes with type and shape, then the elements in C order.

The format is in the book (``formats/tensor.md``). Neither numpy nor torch is imported before a tensor is handled.
"""

import struct
import sys
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from .errors import InvalidError

Tensor = Any
"""A ``torch.Tensor``, a ``numpy.ndarray``, or anything with ``__dlpack__``."""

HEADER_BYTES = 256
MAX_DIMENSIONS = 8

_MAGIC = b"TPTN"
_VERSION = 1
# magic, version, type, dimensions, data bytes, shape, whole shape, split dimension + 1, rank, size
_HEADER = struct.Struct("<4sHBBQ8q8qBxHH")

# Place = number in the header. Elements without a numpy type of their own have None there.
_TYPES = (
    ("float32", "float32", 4),
    ("float64", "float64", 8),
    ("int8", "int8", 1),
    ("uint8", "uint8", 1),
    ("int16", "int16", 2),
    ("uint16", "uint16", 2),
    ("int32", "int32", 4),
    ("uint32", "uint32", 4),
    ("int64", "int64", 8),
    ("uint64", "uint64", 8),
    ("bool", "bool", 1),
    ("float16", "float16", 2),
    ("bfloat16", None, 2),
    ("float8_e4m3fn", None, 1),
    ("float8_e5m2", None, 1),
)
_NUMBERS = {name: number for number, (name, _, _) in enumerate(_TYPES)}


class Header(NamedTuple):
    """What is known of a stored tensor. A shard has the shape of the whole, the split dimension, its rank, and how many
    there are; another has its own shape twice, -1, 0 and 1."""

    type_number: int
    shape: Tuple[int, ...]
    data_bytes: int
    whole_shape: Tuple[int, ...]
    split_dimension: int = -1
    rank: int = 0
    size: int = 1

    @property
    def type_name(self) -> str:
        """As torch names it."""
        return _TYPES[self.type_number][0]

    @property
    def element_bytes(self) -> int:
        """Of one element."""
        return _TYPES[self.type_number][2]


def encode(tensor: Tensor) -> Tuple[bytes, Any]:
    """Header and elements; the elements share the tensor's memory if it is contiguous and in host memory."""
    type_number, shape, data = elements(tensor)
    header = Header(type_number, shape, memoryview(data).nbytes, shape)
    return pack(header), data


def pack(header: Header) -> bytes:
    """A header's bytes."""

    def padded(shape: Sequence[int]) -> List[int]:
        return [*shape, *[-1] * (MAX_DIMENSIONS - len(shape))]

    packed = _HEADER.pack(
        _MAGIC,
        _VERSION,
        header.type_number,
        len(header.shape),
        header.data_bytes,
        *padded(header.shape),
        *padded(header.whole_shape),
        header.split_dimension + 1,
        header.rank,
        header.size,
    )
    return packed.ljust(HEADER_BYTES, b"\0")


def unpack(value: Any) -> Header:
    """The header at the start of ``value``. Raises ``NOT_A_TENSOR`` if there is none that fits the bytes behind it."""
    view = memoryview(value)
    if view.nbytes < HEADER_BYTES:
        raise _no_tensor("it is shorter than a header")
    magic, version, type_number, dimensions, data_bytes, *rest = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION:
        raise _no_tensor("it begins otherwise")
    if type_number >= len(_TYPES) or dimensions > MAX_DIMENSIONS:
        raise _no_tensor("its type or number of dimensions is unknown")
    shape, whole_shape = tuple(rest[:dimensions]), tuple(rest[8 : 8 + dimensions])
    split_dimension, rank, size = rest[16:]
    count = 1
    for extent in shape:
        count *= extent
    if min((*shape, *whole_shape), default=0) < 0 or count * _TYPES[type_number][2] != data_bytes:
        raise _no_tensor("its shape does not fit its length")
    return Header(type_number, shape, data_bytes, whole_shape, split_dimension - 1, rank, size)


def number_of(type_name: str) -> Optional[int]:
    """The number in a header of a type that torch names so; None if it can't be stored."""
    return _NUMBERS.get(type_name)


def decode(value: Any, framework: Optional[str] = None) -> Tensor:
    """The tensor whose header and elements are in ``value``; it shares that memory."""
    header = unpack(value)
    if memoryview(value).nbytes != HEADER_BYTES + header.data_bytes:
        raise _no_tensor("its length is not what its header says")
    return build(header, value, HEADER_BYTES, framework)


def build(header: Header, memory: Any, offset: int, framework: Optional[str] = None) -> Tensor:
    """A tensor over ``memory`` from ``offset`` on."""
    framework = framework or ("torch" if "torch" in sys.modules else "numpy")
    name, numpy_name, _ = _TYPES[header.type_number]
    if framework == "torch":
        import torch

        dtype = getattr(torch, name)
        if header.data_bytes == 0:
            return torch.empty(header.shape, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=header.data_bytes)
        return flat.view(dtype).reshape(header.shape)
    if framework != "numpy":
        raise InvalidError(f"framework is {framework!r}: give numpy or torch", "BAD_ARGUMENT", field="framework")
    import numpy

    dtype = numpy.dtype(numpy_name) if numpy_name else _extension_type(name)
    if header.data_bytes == 0:
        return numpy.empty(header.shape, dtype)
    count = header.data_bytes // dtype.itemsize
    return numpy.frombuffer(memory, dtype, count, offset).reshape(header.shape)


def elements(tensor: Tensor) -> Tuple[int, Tuple[int, ...], Any]:
    """Number of the type, shape, and a one-dimensional buffer of the elements in C order."""
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "detach"):
        import torch

        number = _number(str(tensor.dtype).split(".")[-1])
        shape = tuple(tensor.shape)
        _check_dimensions(shape)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return number, shape, flat.view(torch.uint8).numpy() if flat.numel() else b""
    import numpy

    if not isinstance(tensor, numpy.ndarray):
        if not hasattr(tensor, "__dlpack__"):
            raise TypeError(f"a tensor has __dlpack__; {type(tensor).__name__} has not")
        tensor = numpy.from_dlpack(tensor)
    number = _number(tensor.dtype.name if tensor.dtype.isnative else str(tensor.dtype))
    _check_dimensions(tensor.shape)
    flat = numpy.ascontiguousarray(tensor).reshape(-1)
    return number, tuple(tensor.shape), flat.view(numpy.uint8) if flat.size else b""


def _check_dimensions(shape: Sequence[int]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        words = f"a tensor has at most {MAX_DIMENSIONS} dimensions, this one {len(shape)}"
        raise InvalidError(words, "BAD_ARGUMENT", field="tensor")


def _number(name: str) -> int:
    number = _NUMBERS.get(name)
    if number is None:
        raise InvalidError(f"tensors of {name} can't be stored", "BAD_ARGUMENT", field="tensor")
    return number


def _extension_type(name: str) -> Any:
    import numpy

    try:
        import ml_dtypes
    except ImportError:
        words = f"numpy has no {name}: ask for framework='torch', or install ml_dtypes"
        raise InvalidError(words, "BAD_ARGUMENT", field="framework") from None
    return numpy.dtype(getattr(ml_dtypes, name))


def _no_tensor(why: str) -> InvalidError:
    return InvalidError(f"the object is not a tensor: {why}", "NOT_A_TENSOR")
