"""What a GPU that is not there answers: streams and events in order, pinned memory that is kept, one kind of device."""

from __future__ import annotations

import pytest
import torch

from argosy.plan.plan import HOPPER
from argosy.simulate.cuda_calls import BLACKWELL, FAKE_MEMORY_BYTES, FakeDevice, FakeEvent, answered
from argosy.simulate.device_watch import DEFAULT, DeviceWatch


@pytest.fixture
def watch():
    watch = DeviceWatch()
    with watch.counting("test"):
        yield watch


@pytest.fixture
def device(watch) -> FakeDevice:
    return FakeDevice(watch)


def waits(watch: DeviceWatch) -> list[str]:
    return [found.what for found, count in watch.host_syncs.items() for _ in range(count)]


def test_memory_is_pinned_in_blocks_of_powers_of_two_and_given_out_again(watch, device):
    first, second = torch.zeros(100), torch.zeros(120)  # 400 and 480 bytes: 512 each
    device.pin(first)
    device.pin(first[:10])  # of the same memory
    assert waits(watch) == ["host memory is pinned"] and device.is_pinned(first[5:]) and not device.is_pinned(second)
    device.pin(second)
    assert len(waits(watch)) == 2
    del first
    third, larger = torch.zeros(65), torch.zeros(200)  # 260 bytes fit what the first gave back; 800 do not
    device.pin(third)
    assert len(waits(watch)) == 2 and device.is_pinned(third)
    device.pin(larger)
    assert len(waits(watch)) == 3


def test_a_stream_is_the_current_one_within_its_block(device):
    one, other = device.new_stream(), device.new_stream()
    assert device.stream is device.default and one.name != other.name and one.stream_id != other.stream_id
    with one:
        with other:
            assert device.stream is other
        assert device.stream is one
    assert device.stream is device.default


@pytest.mark.parametrize("how", ["stream", "event", "recorded event", "nothing"])
def test_a_stream_comes_after_what_it_waits_for(watch, device, how):
    x, side = torch.zeros(4), device.new_stream()
    watch.streams.ran(DEFAULT, [], [x])
    if how == "stream":
        side.wait_stream(device.default)
    elif how == "event":
        event = FakeEvent(device)
        event.record()
        event.wait(side)
    elif how == "recorded event":
        side.wait_event(device.default.record_event())
    watch.streams.ran(side.name, [x], [])
    assert bool(watch.races) is (how == "nothing")


@pytest.mark.parametrize("what", ["stream", "event"])
def test_a_host_that_waits_is_counted_and_knows_what_was_done(watch, device, what):
    x, side = torch.zeros(4), device.new_stream()
    watch.streams.ran(side.name, [], [x])
    done = side if what == "stream" else side.record_event()
    done.synchronize()
    assert waits(watch) == [f"{'a stream' if what == 'stream' else 'an event'} is waited for"]
    watch.streams.ran(DEFAULT, [], [x])  # the host puts it there, after all that it knows of
    assert not watch.races and done.query()


def test_a_message_is_read_after_the_wait_for_its_tensor(watch, device):
    x = torch.zeros(4)
    device.sent("group of two ranks", [], [x])
    device.wait_for(x)
    watch.streams.ran(DEFAULT, [x], [])
    assert not watch.races
    device.sent("group of two ranks", [], [x])
    watch.streams.ran(DEFAULT, [x], [])
    assert watch.races.total() == 1


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_torch_is_answered_for_one_kind_of_device_while_the_block_runs(watch, device, capability):
    before = torch.cuda.is_available, torch.cuda.current_stream, torch.Event
    with answered(device, watch, capability):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 8
        assert torch.cuda.get_device_capability(0) == capability
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor, properties.total_memory) == (*capability, 80 * 2**30)
        assert torch.cuda.mem_get_info() == (FAKE_MEMORY_BYTES, FAKE_MEMORY_BYTES)
        assert torch.accelerator.current_accelerator() == torch.device("cuda", 0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() is torch.accelerator.current_stream() is stream
        assert torch.Event().elapsed_time(torch.cuda.Event()) == 1.0
        torch.cuda.synchronize()
    assert waits(watch) == ["the device is waited for"]
    assert before == (torch.cuda.is_available, torch.cuda.current_stream, torch.Event)
