"""The transfer engine of our own API: what differs from the compatible module, which has the long tests."""

import pytest

import tidepool


def test_buffers_are_kept_and_moved():
    with tidepool.TransferEngine() as here, tidepool.TransferEngine() as there:
        source, target = bytearray(b"hello" * 1000), bytearray(5000)
        here.register(source)
        address, length = there.register(target)
        assert length == 5000
        assert there.regions_of(there.session) == [(address, 5000)]
        here.write(there.session, source, address, 5000)
        assert target == source
        with pytest.raises(BufferError):
            target.clear()
        here.read(there.session, source, address + 1, 4)
        assert source[:5] == b"elloo"
        moving = here.start(there.session, [source], [address], [5000], write=True)
        moving.wait()
        assert moving.poll() is True and moving.failure is None
        here.notify(there.session, b"done")
        assert there.notifications() == [b"done"]
        here.probe(there.session)
        there.unregister(address)
        target.clear()


def test_only_who_has_the_secret_gets_in():
    with tidepool.TransferEngine(secret="one") as there:
        with tidepool.TransferEngine(secret="other") as other:
            with pytest.raises(tidepool.InvalidError) as error:
                other.probe(there.session)
            assert error.value.reason == "UNAUTHENTICATED"
        with tidepool.TransferEngine(secret="one") as here:
            here.probe(there.session)


def test_mistakes_have_reasons():
    with tidepool.TransferEngine() as engine:
        buffer = bytearray(100)
        address, _ = engine.register(buffer)
        for call, reason in (
            (lambda: engine.register(buffer), "OVERLAP"),
            (lambda: engine.register_memory(0, 10), "BAD_ADDRESS"),
            (lambda: engine.unregister(4096), "NOT_REGISTERED"),
            (lambda: engine.read(engine.session, address, 4096, 10), "NOT_REGISTERED"),
            (lambda: engine.read_batch(engine.session, [address], [], [10]), "LENGTH_MISMATCH"),
            (lambda: engine.read("nowhere", address, address, 10), "BAD_ENDPOINT"),
        ):
            with pytest.raises(tidepool.InvalidError) as error:
                call()
            assert error.value.reason == reason
        with pytest.raises(BufferError):
            engine.register(b"read-only")
