"""Bundles: several buffers and tensors as one object."""

import json

import pytest

numpy = pytest.importorskip("numpy")

from mooncake.store import ReplicateConfig, _tensor_metadata_size  # noqa: E402
from mooncake.structured_object_store import (  # noqa: E402
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    raw_destination,
    tensor_object_buffer,
)

import tidepool  # noqa: E402
from tidepool import tensors  # noqa: E402

try:
    import torch
except ImportError:
    torch = None


@pytest.fixture
def bundles(store, key):
    return MooncakeBundleTransfer(store, key_prefix=key, default_chunk_bytes=1000)


def same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


ROWS = numpy.arange(700 * 3, dtype="int32").reshape(700, 3)


def test_an_object_comes_back_as_it_was(bundles, store):
    members = {
        "rows": ROWS,
        "half": numpy.arange(6, dtype="float16").reshape(2, 1, 3),
        "nothing": numpy.zeros((0, 4), "int64"),
        "one": numpy.array(7.5, "float32"),
        "scalar": numpy.float32(7.5),
        "bytes": b"some bytes" * 500,
        "none": b"",
        "not contiguous": ROWS[::2],
    }
    ref = bundles.put_structured_object(StructuredObjectPayload({"step": 7, "name": "é"}, members), partition="train/1")
    # In another process only the key is known.
    for seen in (ref, {"manifest_key": ref.manifest_key}, RemoteBundleRef(ref.manifest_key, {})):
        result = bundles.materialize(bundles.read_spec(seen))
        assert (result.metadata["step"], result.metadata["name"]) == (7, "é")
        assert list(result.objects) == list(members)
        for name, value in members.items():
            found = result.objects[name]
            is_bytes = isinstance(value, bytes)
            assert found == value if is_bytes else same(found, value)
    bundles.release_result(result)
    assert bundles.put_object(members).manifest["object_id"] != bundles.put_object(members).manifest["object_id"]


@pytest.mark.parametrize("value", [ROWS, b"bytes", {"a": ROWS, "b": b"x"}])
def test_put_object_is_the_inverse_of_get_object(bundles, value):
    found = bundles.get_object(bundles.put_object(value))
    if isinstance(value, dict):
        assert same(found["a"], value["a"]) and found["b"] == b"x"
    else:
        assert same(found, value) if isinstance(value, numpy.ndarray) else found == value


@pytest.mark.parametrize("start, end, step", [(0, 700, 1), (0, 0, 1), (0, 1, 1), (83, 84, 1), (82, 500, 1), (699, 700, 5), (3, 700, 7)])
def test_rows_of_members_are_read_alone(bundles, start, end, step):
    ref = bundles.put_object({"rows": ROWS, "other": b"not read"})
    spec = bundles.read_spec(ref).select_members(["rows"]).slice_member("rows", 0, start, end, step)
    expected = ROWS[start:end:step]
    assert spec.member_slice("rows").start == start and spec.member_slice("other") is None
    result = bundles.materialize(spec)
    assert list(result.objects) == ["rows"] and same(result.objects["rows"], expected)
    into = numpy.empty_like(expected)
    assert bundles.materialize_into(spec, {"rows": into}).objects["rows"] is into and same(into, expected)


def test_tensors_go_from_and_to_addresses(bundles, memory):
    header = _tensor_metadata_size()
    array = numpy.arange(40, dtype="float32").reshape(10, 4)
    packed, data = tensors.encode(array)
    source = memory(header + 160, packed + bytes(data))
    ref = bundles.put_structured_object(
        StructuredObjectPayload(buffers={"t": tensor_object_buffer(source.address, header + 160, source)})
    )
    found = bundles.get_object(ref)["t"]
    assert numpy.array_equal(numpy.asarray(found), array) and (torch is None) == isinstance(found, numpy.ndarray)
    for start, end, step in ((0, 10, 1), (2, 9, 1), (1, 10, 4), (5, 5, 1)):
        target = memory(header + 160)
        place = raw_destination(target.address, header + 160, target)
        spec = bundles.read_spec(ref).slice_member("t", 0, start, end, step)
        assert bundles.materialize_into(spec, {"t": place}).objects["t"] is place
        rows = array[start:end:step]
        assert numpy.array_equal(tensors.decode(bytes(target[: header + rows.nbytes]), "numpy"), rows)
    with pytest.raises(ValueError, match="at least"):
        bundles.materialize_into(bundles.read_spec(ref), {"t": raw_destination(target.address, header + 159)})
    with pytest.raises(ValueError, match="raw_destination"):
        bundles.materialize_into(bundles.read_spec(ref), {"t": array})
    with pytest.raises(ValueError):
        bundles.put_object({"t": tensor_object_buffer(source.address, header + 159)})
    with pytest.raises(tidepool.InvalidError):
        bundles.put_object({"t": tensor_object_buffer(4096, header)})


def test_torch_tensors_come_back(bundles):
    pytest.importorskip("torch")
    value = torch.arange(12).reshape(3, 4).to(torch.bfloat16)
    found = bundles.get_object(bundles.put_object({"t": value}))["t"]
    assert found.dtype == torch.bfloat16 and torch.equal(found, value)
    sliced = bundles.materialize(bundles.read_spec(bundles.put_object({"t": value})).slice_member("t", 0, 1, 3))
    assert torch.equal(sliced.objects["t"], value[1:])


def test_what_can_not_be_read_says_so(bundles, store):
    ref = bundles.put_object({"rows": ROWS, "bytes": b"bytes"})
    spec = bundles.read_spec(ref)
    for axis, start, end, step in ((1, 0, 1, 1), (0, -1, 1, 1), (0, 0, 701, 1), (0, 5, 4, 1), (0, 0, 1, 0)):
        with pytest.raises(ValueError, match="rows"):
            bundles.materialize(spec.select_members(["rows"]).slice_member("rows", axis, start, end, step))
    with pytest.raises(ValueError, match="bytes"):
        bundles.materialize(spec.slice_member("bytes", 0, 0, 1))
    with pytest.raises(ValueError):
        bundles.materialize(spec.select_members([]))
    with pytest.raises(KeyError, match="unknown"):
        bundles.materialize(spec.select_members(["rows", "none"]))
    frozen = numpy.empty_like(ROWS)
    frozen.flags.writeable = False
    for wrong in (numpy.empty((700, 4), "int32"), ROWS.astype("int64"), numpy.empty((3, 700), "int32").T, frozen, bytearray(8400)):
        with pytest.raises(ValueError, match="rows"):
            bundles.materialize_into(spec, {"rows": wrong})
    with pytest.raises(KeyError):
        bundles.get_object({"manifest_key": "none"})
    for wrong in ({}, {"manifest_key": 7}, {"manifest": {"version": 2}}):
        with pytest.raises(ValueError):
            bundles.get_object(wrong)
    store.put("no manifest", b"\x80\x04]")
    store.put("no bundle", b"[]")
    for name in ("no manifest", "no bundle"):
        with pytest.raises(ValueError):
            bundles.get_object({"manifest_key": name})
    # A chunk is gone: the object is not read in part.
    assert store.remove(f"{ref.manifest['buffers']['rows']['key']}/3", True) == 0
    with pytest.raises(RuntimeError, match="-704"):
        bundles.get_object(ref)
    assert bundles.materialize(spec.select_members(["bytes"])).objects == {"bytes": b"bytes"}


@pytest.mark.parametrize("place, wrong", [("dtype", "object"), ("dtype", 7), ("shape", [700, -3]), ("shape", [701, 3]), ("shape", "x")])
def test_damaged_metadata_is_refused(bundles, store, place, wrong):
    ref = bundles.put_object({"rows": ROWS})
    meta = f"{ref.manifest['meta']['key']}/0"
    damaged = json.loads(store.get(meta))
    damaged["__mooncake_structured_fields__"]["rows"][place] = wrong
    text = json.dumps(damaged).encode()
    assert store.upsert(meta, text) == 0
    ref.manifest["meta"]["bytes"] = len(text)
    with pytest.raises(ValueError, match="rows"):
        bundles.get_object(ref)


def test_what_can_not_be_put_leaves_nothing(bundles, store, key, monkeypatch):
    for wrong in ({"a": "text"}, {"a": None}, {"a": numpy.array([object()])}, {"": b"x"}, {"a": memoryview(b"abcd")[::2]}):
        with pytest.raises((TypeError, ValueError, BufferError, tidepool.InvalidError)):
            bundles.put_object(wrong)
    with pytest.raises(TypeError):
        StructuredObjectPayload({})
    with pytest.raises(ValueError):
        bundles.put_structured_object(StructuredObjectPayload({"x": float("nan")}, {"a": b"x"}))
    for policy in (BundleTransferPolicy(0), BundleTransferPolicy(put_mode="x"), BundleTransferPolicy(copy_mode="x")):
        with pytest.raises(ValueError):
            bundles.put_object({"a": b"x"}, policy=policy)
    for named in ({"chunk_bytes": 0}, {"partition": "/"}, {"max_inflight_put": 0}):
        with pytest.raises(ValueError):
            bundles.put_object({"a": b"x"}, **named)
    config = ReplicateConfig()
    config.group_ids = ["one", "two"]
    with pytest.raises(ValueError):
        bundles.put_object({"a": b"x"}, config=config)
    put = store.batch_put_from

    def without_manifests(keys, *rest):
        return [-200] * len(keys) if keys[0].endswith("manifest") else put(keys, *rest)

    monkeypatch.setattr(store, "batch_put_from", without_manifests)
    with pytest.raises(RuntimeError, match="-200"):
        bundles.put_object({"rows": ROWS})
    assert [found.key for found in tidepool.Store(store._connection).list(key)] == []


def test_a_bundle_is_removed_whole(bundles, store, key):
    config = ReplicateConfig()
    config.group_ids = ["g"]
    ref = bundles.put_bundle(b"meta", {"a": b"x" * 5000, "b": bytearray(3)}, config=config)
    listed = list(tidepool.Store(store._connection).list(key))
    assert len(listed) == 8 and {found.group for found in listed} == {"g"}
    spec = StructuredObjectReadSpec({"manifest_key": ref.manifest_key})
    with pytest.raises(ValueError):
        bundles.materialize(spec)  # `meta` is no JSON
    for _ in range(2):
        bundles.remove_bundle({"manifest_key": ref.manifest_key})
        bundles.remove_bundle(ref)
        assert list(tidepool.Store(store._connection).list(key)) == []
