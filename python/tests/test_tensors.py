"""Tensors keep shape and type, from numpy, torch, and whatever speaks DLPack."""

import pytest

import tidepool
from tidepool import tensors

numpy = pytest.importorskip("numpy")

TYPES = ["float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float16"]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (1, 2, 1, 2, 1, 2, 1, 2), (0,), (0, 128), (4, 0, 8)]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_type_and_elements_come_back(store, key, name, shape):
    count = int(numpy.prod(shape))
    tensor = (numpy.arange(count) % 101).astype(name).reshape(shape)
    assert store.put_tensor(key, tensor) is True
    got = store.get_tensor(key, framework="numpy")
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert numpy.array_equal(got, tensor)
    assert store.stat(key).data_type == tidepool.DataType.TENSOR


def test_what_is_not_contiguous_is_copied_first(store, key):
    tensor = numpy.arange(24.0).reshape(4, 6)
    for place, part in enumerate((tensor.T, tensor[::2], tensor[:, 1:3], tensor[::-1])):
        store.put_tensor(f"{key}/{place}", part)
        assert numpy.array_equal(store.get_tensor(f"{key}/{place}", framework="numpy"), part)


def test_a_tensor_that_was_read_can_be_changed(store, key):
    store.put_tensor(key, numpy.zeros(10))
    got = store.get_tensor(key, framework="numpy")
    got[3] = 7
    assert store.get_tensor(key, framework="numpy")[3] == 0


def test_what_speaks_dlpack_is_a_tensor(store, key):
    class Wrapped:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    store.put_tensor(key, Wrapped(numpy.arange(6.0).reshape(2, 3)))
    assert store.get_tensor(key, framework="numpy").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_is_no_tensor_is_refused(store, key):
    with pytest.raises(TypeError):
        store.put_tensor(key, [1, 2, 3])
    with pytest.raises(tidepool.InvalidError):
        store.put_tensor(key, numpy.zeros(1, dtype=complex))
    with pytest.raises(tidepool.InvalidError):
        store.put_tensor(key, numpy.zeros((1,) * 9))
    with pytest.raises(tidepool.InvalidError):
        store.put_tensor(key, numpy.zeros(3, dtype=">f4"))
    for place, value in enumerate([b"", b"x" * 255, b"x" * 300, tensors.encode(numpy.zeros(3))[0]]):
        store.put(f"{key}/{place}", value)
        with pytest.raises(tidepool.InvalidError) as error:
            store.get_tensor(f"{key}/{place}")
        assert error.value.reason == "NOT_A_TENSOR"
    store.put_tensor(key, numpy.zeros(3))
    with pytest.raises(tidepool.InvalidError):
        store.get_tensor(key, framework="jax")


@pytest.mark.parametrize("place", range(0, 172, 5))
def test_a_damaged_header_is_no_tensor_or_a_smaller_promise(place):
    whole = bytearray(b"".join(map(bytes, tensors.encode(numpy.arange(12.0).reshape(3, 4)))))
    for value in (0, 1, 0x7F, 0xFF):
        damaged = bytearray(whole)
        damaged[place] = value
        try:
            got = tensors.decode(damaged, "numpy")
        except tidepool.InvalidError:
            continue
        assert got.nbytes == 96


def test_bfloat16_needs_torch_or_says_so(store, key):
    header = tensors.Header(12, (2,), 4, (2,))
    store.put(key, tensors.pack(header) + b"\x80\x3f\x00\x40")
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        with pytest.raises(tidepool.InvalidError, match="torch"):
            store.get_tensor(key, framework="numpy")
    else:
        assert store.get_tensor(key, framework="numpy").astype("float32").tolist() == [1.0, 2.0]


def test_torch_tensors_come_back(store, key):
    torch = pytest.importorskip("torch")
    for name in [*TYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]:
        if not hasattr(torch, name):
            continue
        for shape in SHAPES:
            tensor = torch.arange(int(numpy.prod(shape))).reshape(shape).to(getattr(torch, name))
            store.put_tensor(key, tensor, upsert=True)
            got = store.get_tensor(key)
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(got.view(torch.uint8) if got.numel() and got.ndim else got.float(), tensor.view(torch.uint8) if got.numel() and got.ndim else tensor.float())


def test_trees_come_back(store, key):
    tree = {
        "layers": [{"k": numpy.ones((2, 3), "float16"), "v": numpy.zeros((0, 4))} for _ in range(3)],
        "pair": (1, 2.5, None, True, "text", b"\0bytes"),
        "empty": [{}, [], ()],
    }
    assert store.put_tree(key, tree) is True
    got = store.get_tree(key, framework="numpy")
    assert got["pair"] == tree["pair"] and got["empty"] == tree["empty"]
    for before, after in zip(tree["layers"], got["layers"]):
        for name in before:
            assert numpy.array_equal(before[name], after[name]) and before[name].dtype == after[name].dtype
    store.remove(f"{key}/leaf/0")
    assert store.get_tree(key) is None


def test_what_is_no_tree_is_refused(store, key):
    with pytest.raises(TypeError):
        store.put_tree(key, {1: 2})
    with pytest.raises(TypeError):
        store.put_tree(key, {"a": object()})
    endless = []
    endless.append(endless)
    with pytest.raises(tidepool.InvalidError):
        store.put_tree(key, endless)
    store.put(key, b"{}")
    with pytest.raises(tidepool.InvalidError) as error:
        store.get_tree(key)
    assert error.value.reason == "NOT_A_TREE"
